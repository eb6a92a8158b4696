// The draft tree of one step.

import { make } from "./pane.js";

const sources = []; // in the order in which they were first seen, so that each keeps its colour

export function colourOf(source) {
  if (!sources.includes(source)) sources.push(source);
  return sources.indexOf(source) % 6;
}

const shown = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ /, "·") || "∅";
const percent = (p) => `${(100 * p).toFixed(p < 0.0995 ? 1 : 0)}%`;

function branch(nodes, parent) {
  const list = make("ul");
  nodes.forEach((node, i) => {
    if (node.parent !== parent) return;
    const item = make("li");
    const chip = make("span", `node d${colourOf(node.source)}${node.accepted ? " yes" : ""}`, shown(node.text));
    chip.append(make("i", "", percent(node.probability)));
    const more = node.num_sources > 1 ? ` and ${node.num_sources - 1} more` : "";
    chip.title = `proposed by ${node.source}${more}, ${node.accepted ? "accepted" : "not accepted"}`;
    item.append(chip);
    if (nodes.some((other) => other.parent === i)) item.append(branch(nodes, i));
    list.append(item);
  });
  return list;
}

export function showTree(step, place, count, into) {
  const { title, facts, tree, legend } = into;
  title.textContent = `Draft tree of step ${place + 1} of ${count}`;
  const accepted = step.nodes.filter((node) => node.accepted).length;
  const prompt = step.prompt_rows ? `, beside ${step.prompt_rows} rows of the prompt` : "";
  const window = step.window_rows ? `, ${step.window_rows} of the lookahead window` : "";
  facts.textContent = `${step.nodes.length} draft tokens, ${accepted} accepted, then one token of the model: ` +
    `${step.emitted.map(shown).join(" ")} (${step.rows} rows${window}${prompt}, ${(1000 * step.seconds).toFixed(1)} ms, ` +
    `${step.expected.toFixed(2)} tokens expected)`;
  const root = make("ul"), item = make("li");
  const chip = make("span", "node root", shown(step.last_token));
  chip.title = "the last token before the step";
  item.append(chip);
  if (step.nodes.length) item.append(branch(step.nodes, -1));
  else item.append(make("span", "dim", "No draft tokens in this step."));
  root.append(item);
  tree.replaceChildren(root);
  tree.scrollTo(0, 0);
  const names = [...new Set(step.nodes.map((node) => node.source))];
  legend.replaceChildren(...names.map((name) => make("span", `d${colourOf(name)}`, name)));
}
