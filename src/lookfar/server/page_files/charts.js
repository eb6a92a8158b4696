// The server's load over the last minutes: tiles and line charts from snapshots of /lookfar/status.

import { make, showFigures } from "./pane.js";
import { colourOf } from "./tree.js";

const LEAST_SPAN = 60, MOST_SPAN = 300; // seconds
const WINDOW = 5; // snapshots over which rates are taken
const SVG = "http://www.w3.org/2000/svg";

const bytes = (n) => n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(1)} GiB` : `${(n / 2 ** 20).toFixed(0)} MiB`;
const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(0)}%` : "–";

function difference(history, value) {
  return history.map((now, i) => {
    const before = history[Math.max(0, i - WINDOW)];
    return [now.time, value(now, before, now.time - before.time)];
  });
}

// Draws lines of [time, value or null] points; each line is { name, colour, points }.
function draw(into, lines, { now, span }, format, most) {
  const top = most ?? Math.max(1e-9, ...lines.flatMap((line) => line.points.map((p) => p[1] ?? 0)));
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 300 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", lines.map((line) => `${line.name}: ${format(line.points.at(-1)?.[1] ?? 0)}`).join(", "));
  for (const y of [25, 50, 75]) {
    const grid = document.createElementNS(SVG, "line");
    for (const [name, value] of Object.entries({ x1: 0, x2: 300, y1: y, y2: y })) grid.setAttribute(name, value);
    svg.append(grid);
  }
  for (const line of lines) {
    const path = document.createElementNS(SVG, "polyline");
    path.setAttribute("class", `l${line.colour}`);
    path.setAttribute("points", line.points.filter((p) => p[1] !== null)
      .map(([time, value]) => `${(300 - (300 / span) * (now - time)).toFixed(1)},${(97 - 92 * value / top).toFixed(1)}`)
      .join(" "));
    svg.append(path);
  }
  const axis = make("div", "axis");
  axis.append(make("span", "", span < 120 ? `${span.toFixed(0)} s ago` : `${(span / 60).toFixed(0)} min ago`), make("span", "", `top: ${format(top)}`), make("span", "", "now"));
  const legend = make("p", "legend dim");
  legend.append(...lines.map((line) => make("span", `d${line.colour}`,
    `${line.name} ${format(line.points.findLast((p) => p[1] !== null)?.[1] ?? 0)}`)));
  into.replaceChildren(svg, axis, legend);
}

export function showServer(history, now, ids) {
  const seen = [...history.filter((one) => now.time - one.time < MOST_SPAN), now];
  const time = { now: now.time, span: Math.max(LEAST_SPAN, now.time - seen[0].time) };
  const number = (n) => n.toFixed(n < 10 ? 1 : 0);
  draw(ids.rate, [{
    name: "tokens/s", colour: 0,
    points: difference(seen, (a, b, seconds) => seconds > 0 ? (a.tokens - b.tokens) / seconds : 0),
  }], time, number);
  draw(ids.requests, [
    { name: "running", colour: 0, points: seen.map((one) => [one.time, one.running]) },
    { name: "waiting", colour: 1, points: seen.map((one) => [one.time, one.waiting]) },
  ], time, (n) => n.toFixed(0), Math.max(now.max_batch, ...seen.map((one) => one.waiting)));
  draw(ids.perstep, [{
    name: "tokens per step", colour: 0,
    points: difference(seen, (a, b) => a.decoded > b.decoded ? (a.tokens - b.tokens) / (a.decoded - b.decoded) : null),
  }], time, (n) => n.toFixed(2));
  const drafters = Object.keys(now.drafters);
  draw(ids.acceptance, drafters.map((name) => ({
    name, colour: colourOf(name),
    points: seen.map((one) => {
      const [proposed, accepted] = one.drafters[name] ?? [0, 0];
      return [one.time, proposed ? accepted / proposed : null];
    }),
  })), time, (n) => `${(100 * n).toFixed(0)}%`, 1);
  const speculates = Object.entries(now.speculating).map(([n, on]) => `${n}: ${on ? "on" : "off"}`).join(", ");
  showFigures(ids.tiles, [
    ["running", `${now.running} of ${now.max_batch}`],
    ["waiting", String(now.waiting)],
    ["tokens per step", now.decoded ? (now.tokens / now.decoded).toFixed(2) : "–"],
    ["KV cache", bytes(now.kv_bytes)],
    ["prefix cache", bytes(now.prefix_bytes)],
    ["prompt tokens cached", share(now.cached_tokens, now.prompt_tokens)],
    ["draft store", `${now.store_tokens.toLocaleString()} tokens`],
    ["speculation by batch", speculates || "–"],
  ]);
}
