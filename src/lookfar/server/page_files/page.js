// The playground: one prompt, decoded with and without speculation, and what the server does meanwhile.

import { showServer } from "./charts.js";
import { Pane } from "./pane.js";
import { ApiError, chunks, getJson } from "./stream.js";
import { showTree } from "./tree.js";

const $ = (id) => document.getElementById(id);
const number = (id) => $(id).value.trim() === "" ? undefined : Number($(id).value);
const panes = { fast: new Pane($("fast"), inspect), plain: new Pane($("plain"), inspect) };
let running = null; // the AbortController of the present run
let inspected = null; // the pane whose step is shown
let history = [];
let hasTemplate = true;

// --- theme

const saved = (() => { try { return localStorage.getItem("theme"); } catch { return null; } })();
const dark = window.matchMedia("(prefers-color-scheme: dark)");
let theme = saved;
function applyTheme() { document.documentElement.dataset.theme = theme ?? (dark.matches ? "dark" : "light"); }
dark.addEventListener("change", applyTheme);
$("theme").addEventListener("click", () => {
  theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("theme", theme); } catch { /* not kept */ }
  applyTheme();
});
applyTheme();

// --- running

function requestBody(speculates) {
  const raw = $("raw").checked || !hasTemplate;
  const messages = [{ role: "user", content: $("prompt").value }];
  if ($("system").value) messages.unshift({ role: "system", content: $("system").value });
  const temperature = number("temperature") ?? 0;
  const sampling = temperature > 0
    ? { temperature, top_p: number("top_p"), top_k: number("top_k"), seed: number("seed") } : { temperature: 0 };
  const rows = $("budget").value.trim();
  const budget = rows === "" ? undefined : /^\d+$/.test(rows) ? Number(rows) : rows;
  const lookfar = speculates
    ? { strategy: $("strategy").value || undefined, budget, remember: $("remember").checked, trace: true }
    : { strategy: "none", remember: false, trace: true };
  const body = { max_tokens: number("max_tokens"), stream: true, lookfar, ...sampling };
  return raw ? ["/v1/completions", { ...body, prompt: $("prompt").value }]
    : ["/v1/chat/completions", { ...body, messages }];
}

async function decode(pane, speculates, signal) {
  const [path, body] = requestBody(speculates);
  pane.start();
  for await (const chunk of chunks(path, body, $("key").value, signal)) {
    if (chunk.choices.length) pane.add(chunk.choices[0]);
  }
}

function say(text, kind = "") {
  $("verdict").textContent = text;
  $("verdict").className = kind;
}

function verdict() {
  const { fast, plain } = panes;
  const speed = `${fast.tokens} tokens in ${fast.steps.length} steps, ${fast.perStep.toFixed(2)} tokens per step`;
  if ($("compare").value === "off") return say(`${speed}, ${fast.rate.toFixed(1)} tokens/s.`);
  const times = (plain.seconds / fast.seconds).toFixed(2);
  if (fast.text === plain.text) say(`The same text, ${times}× as fast: ${speed}.`, "good");
  else say("The two texts differ.", "bad");
}

async function run() {
  if (running) return;
  const controller = running = new AbortController();
  $("run").disabled = true;
  $("stop").disabled = false;
  for (const pane of Object.values(panes)) pane.clear(number("max_tokens") ?? 4096);
  $("inspector").hidden = true;
  inspected = null;
  const compare = $("compare").value;
  say("Running …");
  try {
    const fast = decode(panes.fast, true, controller.signal);
    if (compare === "beside") await Promise.all([fast, decode(panes.plain, false, controller.signal)]);
    else {
      await fast;
      if (compare === "after") await decode(panes.plain, false, controller.signal);
    }
    verdict();
  } catch (error) {
    if (controller.signal.aborted) say("Stopped.");
    else if (error instanceof ApiError && error.status === 401) {
      document.querySelector("details").open = true;
      $("key").focus();
      say("This server needs an API key: type it into the settings.", "bad");
    } else say(error.message, "bad");
    controller.abort();
  } finally {
    running = null;
    $("run").disabled = false;
    $("stop").disabled = true;
  }
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
$("stop").addEventListener("click", () => running?.abort());
$("compare").addEventListener("change", () => $("panes").classList.toggle("single", $("compare").value === "off"));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
  if (event.key === "Escape") running?.abort();
});

// --- the tree of a step

function inspect(pane, place) {
  inspected = pane;
  for (const other of Object.values(panes)) if (other !== pane) other.deselect();
  $("inspector").hidden = false;
  const into = { title: $("tree-title"), facts: $("step-facts"), tree: $("tree"), legend: $("sources") };
  showTree(pane.steps[place], place, pane.steps.length, into);
}

function move(by) {
  if (!inspected?.steps.length) return;
  inspected.select(Math.max(0, Math.min(inspected.steps.length - 1, (inspected.selected ?? 0) + by)));
}
$("previous").addEventListener("click", () => move(-1));
$("next").addEventListener("click", () => move(1));

// --- the server

const chartIds = { rate: $("rate"), requests: $("requests"), perstep: $("perstep"), acceptance: $("acceptance"), tiles: $("tiles") };

async function watch() {
  if (!document.hidden) {
    try {
      const since = history.at(-1)?.time ?? 0;
      const status = await getJson(`/lookfar/status?since=${since}`, $("key").value);
      history = [...history, ...status.history].slice(-300);
      hasTemplate = status.has_chat_template;
      $("model").textContent = `${status.model} on ${status.device}`;
      $("load").textContent = `${status.now.running} running, ${status.now.waiting} waiting`;
      showServer(history, status.now, chartIds);
    } catch (error) {
      $("load").textContent = error instanceof ApiError ? error.message : "The server does not answer.";
    }
  }
  setTimeout(watch, 1000);
}
watch();
