// One pane: an answer as it comes, coloured by step, and its figures.

const COLOURS = 6;

export function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function showFigures(list, figures) {
  list.replaceChildren(...figures.map(([name, value]) => {
    const entry = make("div");
    entry.append(make("dt", "", name), make("dd", "", value));
    return entry;
  }));
}

export class Pane {
  // `onSelect(pane, index)` is called when a step is chosen.
  constructor(section, onSelect) {
    this.answer = section.querySelector(".answer");
    this.figures = section.querySelector(".figures");
    this.bar = section.querySelector(".bar i");
    this.onSelect = onSelect;
    this.answer.addEventListener("click", (event) => {
      const place = [...this.answer.children].indexOf(event.target);
      if (place >= 0) this.select(place);
    });
    this.answer.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };
      if (!this.steps.length || !(event.key in moves || event.key === "Home" || event.key === "End")) return;
      event.preventDefault();
      const last = this.steps.length - 1;
      const to = event.key === "Home" ? 0 : event.key === "End" ? last : (this.selected ?? -1) + moves[event.key];
      this.select(Math.max(0, Math.min(last, to)));
    });
    this.clear(1);
  }

  clear(maxTokens) {
    this.steps = [];
    this.text = "";
    this.tokens = 0;
    this.rows = 0;
    this.selected = null;
    this.maxTokens = maxTokens;
    this.started = this.first = this.last = performance.now();
    this.finishReason = null;
    this.answer.replaceChildren();
    this.show();
  }

  start() {
    this.started = this.last = performance.now();
    this.first = null;
  }

  get seconds() { return (this.last - this.started) / 1000; }
  get rate() { return this.seconds > 0 ? this.tokens / this.seconds : 0; }
  get perStep() { return this.steps.length ? this.tokens / this.steps.length : 0; }

  // Adds a chunk of the stream, whose choice carries its steps.
  add(choice) {
    this.last = performance.now();
    const follows = this.answer.scrollHeight - this.answer.scrollTop - this.answer.clientHeight < 30;
    for (const step of choice.lookfar?.steps ?? []) {
      if (!step.emitted.length) {
        this.answer.lastElementChild?.append(step.text);
        this.text += step.text;
        continue;
      }
      this.first ??= this.last;
      const piece = make("span", `k${this.steps.length % COLOURS}`, step.text);
      piece.setAttribute("role", "option");
      piece.setAttribute("aria-selected", "false");
      piece.title = `step ${this.steps.length + 1}: ${step.emitted.length} token${step.emitted.length > 1 ? "s" : ""}`;
      piece.id = `${this.answer.parentElement.id}-step-${this.steps.length}`;
      this.answer.append(piece);
      this.steps.push(step);
      this.text += step.text;
      this.tokens += step.emitted.length;
      this.rows += step.rows;
    }
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    if (follows) this.answer.scrollTop = this.answer.scrollHeight;
    this.show();
  }

  show() {
    const first = this.first && this.tokens ? `${((this.first - this.started) / 1000).toFixed(2)} s` : "–";
    showFigures(this.figures, [
      ["tokens/s", this.tokens ? this.rate.toFixed(1) : "–"],
      ["tokens per step", this.tokens ? this.perStep.toFixed(2) : "–"],
      ["tokens", String(this.tokens)],
      ["steps", String(this.steps.length)],
      ["first token", first],
    ]);
    const done = this.finishReason ? 1 : this.tokens / this.maxTokens;
    this.bar.style.setProperty("width", `${Math.min(100, 100 * done)}%`);
  }

  select(place) {
    if (this.selected !== null) this.answer.children[this.selected]?.setAttribute("aria-selected", "false");
    this.selected = place;
    const piece = this.answer.children[place];
    if (!piece) return;
    piece.setAttribute("aria-selected", "true");
    piece.scrollIntoView({ block: "nearest" });
    this.answer.setAttribute("aria-activedescendant", piece.id);
    this.onSelect(this, place);
  }

  deselect() {
    if (this.selected !== null) this.answer.children[this.selected]?.setAttribute("aria-selected", "false");
    this.answer.removeAttribute("aria-activedescendant");
    this.selected = null;
  }
}
