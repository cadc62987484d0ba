// The page: polls for new data every second, and draws the shown runs.

import {h, fetchJson, colour, forgetColours, count, short, plain, seconds, bytes, percent, table} from "./dom.js";
import {Chart, View} from "./chart.js";
import {Compare} from "./compare.js";
import {Ranks} from "./ranks.js";
import {Timeline} from "./timeline.js";

const EVERY_MS = 1000, RANKS_EVERY_MS = 2000, MANY_RANKS_EVERY_MS = 6000;
const byId = id => document.getElementById(id);
const PARTS = [["data", "part-data"], ["forward_backward", "part-forward"], ["norms", "run-2"], ["clip", "part-clip"],
  ["read", "part-communication"], ["optimizer", "part-optimizer"],
  ["rest", "part-rest"], ["save", "part-save"], ["evaluation", "part-evaluation"]];
const STATES = {running: "running", done: "done", failed: "failed", lost: "ended", stopped: "stopped", waiting: "waiting"};

const view = new View();
const runs = [];
const panels = {};
let divergences = new Map(), isPaused = false, isBusy = false, isStale = false, charts = [], drawnAt = 0;

// -- charts of all shown runs

const lines = (name, label) => run => run.series[name] ? [{label: label(run), colour: run.variable, ...run.series[name]}] : [];
const only = run => run.state.name;

// Draw checkpoints, restarts, faults and first differing steps; labels go into rows, so that they do not overlap.
const marks = (u, hasLabels) => {
  const rows = [];
  const drawLabel = (text, x) => {
    if (!hasLabels) return;
    const wide = pen.measureText(text).width + 10 * ratio, isLeft = x + wide > bbox.left + bbox.width, from = isLeft ? x - wide : x;
    let row = rows.findIndex(last => last.every(([low, high]) => from >= high || from + wide <= low));
    if (row < 0) row = rows.push([]) - 1;
    rows[row].push([from, from + wide]);
    pen.textAlign = isLeft ? "right" : "left";
    // An outline in the background colour keeps it readable over lines.
    const ink = pen.strokeStyle;
    pen.strokeStyle = colour("card");
    pen.setLineDash([]);
    pen.lineWidth = 4 * ratio;
    pen.lineJoin = "round";
    pen.strokeText(text, x + (isLeft ? -5 : 5) * ratio, bbox.top + (9 + 14 * row) * ratio);
    pen.strokeStyle = ink;
    pen.fillText(text, x + (isLeft ? -5 : 5) * ratio, bbox.top + (9 + 14 * row) * ratio);
  };
  const {ctx: pen, bbox} = u, {min, max} = u.scales.x, ratio = window.devicePixelRatio || 1;
  const at = step => Math.round(u.valToPos(step, "x", true));
  pen.save();
  pen.font = `${11 * ratio}px system-ui, sans-serif`;
  for (const run of shown()) { let before = -Infinity; for (const event of run.marks) {
    if (event.step < min || event.step > max) continue;
    const x = at(event.step), low = bbox.top + bbox.height;
    pen.strokeStyle = pen.fillStyle = event.kind === "fault" ? colour("bad") : colour(run.variable);
    pen.lineWidth = 1.4 * ratio;
    if (event.kind === "checkpoint") {
      // Skip triangles that would overlap.
      if (x - before < 9 * ratio) continue;
      before = x;
      pen.beginPath();
      pen.moveTo(x, low - 7 * ratio);
      pen.lineTo(x - 4 * ratio, low);
      pen.lineTo(x + 4 * ratio, low);
      pen.fill();
      continue;
    }
    pen.setLineDash(event.kind === "fault" ? [] : [4 * ratio, 3 * ratio]);
    pen.beginPath();
    pen.moveTo(x, bbox.top);
    pen.lineTo(x, low);
    pen.stroke();
    drawLabel(event.kind, x);
  } }
  for (const [step, text] of divergences) {
    pen.setLineDash([2 * ratio, 2 * ratio]);
    if (step < min || step > max) continue;
    const x = at(step);
    pen.strokeStyle = pen.fillStyle = colour("text");
    pen.lineWidth = 1.4 * ratio;
    pen.beginPath();
    pen.moveTo(x, bbox.top);
    pen.lineTo(x, bbox.top + bbox.height);
    pen.stroke();
    drawLabel(text, x);
  }
  pen.restore();
};

const CHART_SPECS = [
  {title: "Loss", about: "nats per token, or the unit of the objective", format: plain, labels: true, lines: run => [
    ...lines("loss", only)(run),
    ...names(run, "evaluations/").flatMap(name => lines(name, () => `${run.state.name}: ${name.slice(12).replaceAll("_", "-")}`)(run)
      .map(each => ({...each, dots: run.series[name].count > 60 ? 4 : 7}))),
  ], names: run => ["loss", ...names(run, "evaluations/")]},
  {title: "Gradient norm", about: "before clipping", format: plain, lines: lines("grad_norm", only), names: () => ["grad_norm"]},
  {title: "Learning rate", about: "by parameter group", format: plain, axisFormat: short, fromZero: true, lines: run => {
    const groups = names(run, "learning_rates/");
    return groups.length > 1 ? groups.slice(0, 6).flatMap((name, index) => lines(name, () => `${run.state.name}: ${name.slice(15)}`)(run).map(each => ({...each, dashed: index % 2 === 1})))
      : lines("learning_rate", only)(run);
  }, names: run => ["learning_rate", ...names(run, "learning_rates/").slice(0, 6)]},
  {title: "Tokens per second", about: "of all ranks", format: short, fromZero: true, lines: lines("tokens_per_second", only), names: () => ["tokens_per_second"]},
  {title: "Model FLOPs utilization", about: "fraction of the devices' peak", format: percent, fromZero: true, lines: lines("mfu", only), names: () => ["mfu"], needs: "mfu"},
  {title: "Exposed communication", about: "of rank 0, in measured steps", format: seconds, axisFormat: seconds, fromZero: true,
    lines: lines("times/exposed_communication", only), names: () => ["times/exposed_communication"], needs: "times/exposed_communication"},
  {title: "Memory", about: "of rank 0; dashed: current", format: bytes, isBytes: true, fromZero: true, lines: run => {
    const kind = run.state.names.includes("memory/allocated") ? "allocated" : "host";
    return [...lines(`memory/${kind}_peak`, () => `${run.state.name}: ${kind}, peak`)(run),
      ...lines(`memory/${kind}`, () => `${run.state.name}: ${kind}`)(run).map(each => ({...each, dashed: true}))];
  }, names: run => names(run, "memory/"), needs: "memory/"},
];
const names = (run, prefix) => run.state.names.filter(name => name.startsWith(prefix));
const shown = () => runs.filter(run => run.isShown);
const span = () => view.range ? {from: Math.floor(view.range[0]), to: Math.ceil(view.range[1])} : {};
const points = () => Math.max(300, Math.min(1600, Math.round(byId("panels").clientWidth)));

// -- runs

class Run {
  constructor(index) {
    this.index = index;
    this.variable = `run-${index % 8}`;
    this.isShown = true;
    this.series = {};
    this.split = {x: [], columns: {}};
    this.marks = [];
    this.events = [];
    this.seen = {};
    this.ranksAt = 0;
    this.card = h("article", {class: "run", colour: `var(--${this.variable})`});
  }

  // The card of a run: a button that shows or hides it, its description, and its last values.
  updateCard() {
    const {state} = this, {last} = state;
    if (!this.button) {
      this.button = h("button", {type: "button", title: "show or hide this run", onclick: () => this.toggle()});
      this.badge = h("span", {class: "badge"});
      this.about = h("p", {class: "about"});
      this.why = h("p", {class: "why"});
      this.bar = h("progress", {"aria-label": "Completed steps"});
      this.facts = h("dl", {class: "facts"});
      this.note = h("p", {class: "note"});
      this.card.append(h("h2", {}, this.button, this.badge), this.about, this.bar, this.why, this.facts, this.note);
    }
    this.button.textContent = state.name;
    this.button.setAttribute("aria-pressed", this.isShown);
    this.card.classList.toggle("hidden-run", !this.isShown);
    this.badge.className = `badge ${state.state}`;
    this.badge.textContent = STATES[state.state];
    this.about.textContent = [state.strategy, state.mesh, state.world_size && `${count(state.world_size)} rank${state.world_size > 1 ? "s" : ""}`,
      state.parameters && `${short(state.parameters)} parameters`, state.device].filter(Boolean).join(" · ") || state.directory;
    this.about.title = state.directory;
    this.why.textContent = ["failed", "lost", "waiting"].includes(state.state) ? state.reason : "";
    this.why.hidden = !this.why.textContent;
    this.bar.max = state.steps || Math.max(1, state.step);
    this.bar.value = state.step;
    const left = state.steps && state.state === "running" && last.seconds ? (state.steps - state.step) * last.seconds : null;
    const facts = [["step", state.steps ? `${count(state.step)} / ${count(state.steps)}` : count(state.step)], ["loss", plain(last.loss)],
      last.mfu !== undefined ? ["MFU", percent(last.mfu)] : ["tokens/s", short(last.tokens_per_second)], left !== null ? ["time left", seconds(left)] : ["step time", seconds(last.seconds)]];
    this.facts.replaceChildren(...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    const [read, size] = state.read;
    this.note.textContent = [size - read > 1 << 20 && `reading: ${percent(read / size)}`, state.num_unreadable && `${count(state.num_unreadable)} lines of metrics cannot be read and are skipped`,
      state.has_omitted_columns && "some columns are not shown"].filter(Boolean).join("; ");
    this.note.hidden = !this.note.textContent;
  }

  toggle() {
    this.isShown = !this.isShown;
    this.updateCard();
    refresh({all: true});
  }

  async load() {
    const {state} = this, wanted = [...new Set(CHART_SPECS.flatMap(spec => spec.names(this)))].filter(name => state.names.includes(name));
    const parts = names(this, "times/"), own = {run: this.index, points: points(), ...span()}, norms = names(this, "norms/");
    const [series, split, blocks] = await Promise.all([
      fetchJson("series", {...own, name: wanted}),
      fetchJson("series", {...own, points: Math.round(points() / 2), by: "seconds", name: ["seconds", ...parts]}),
      norms.length ? fetchJson("series", {...own, points: 300, name: norms.slice(0, 400)}) : {},
    ]);
    this.series = series;
    this.split = split;
    this.blocks = blocks;
  }

  async loadEvents() {
    this.events = await fetchJson("events", {run: this.index});
    this.marks = [];
    for (const event of this.events) {
      if (event.event === "checkpoint") this.marks.push({kind: "checkpoint", step: event.step});
      if (event.event === "fault") this.marks.push({kind: "fault", step: event.step});
      if (event.event === "start" && event.start_step > 0) this.marks.push({kind: "restart", step: event.start_step});
    }
  }
}

// -- panels of each run

const own = (run, what, make) => (run.own ??= {})[what] ??= make();

const splitOf = run => own(run, "split", () => new Chart({title: "Time of a step", about: run.state.name, swatch: `var(--${run.variable})`, format: seconds, axisFormat: seconds, view, stacked: true, hides: ["evaluation"]}));
const drawSplit = run => {
  const {x, columns} = run.split, found = name => columns[`times/${name}`];
  const series = [];
  for (const [name, variable] of PARTS) {
    const y = name === "rest"
      ? (columns.seconds || []).map((whole, index) => whole === null ? null : Math.max(0, whole - ["data", "forward_backward", "norms", "clip", "read", "optimizer"].reduce((sum, part) => sum + (found(part)?.[index] || 0), 0)))
      : found(name);
    if (y?.some(value => value > 0)) series.push({label: name.replaceAll("_", " "), colour: variable, x, y});
  }
  splitOf(run).update(series);
};
const normsOf = run => own(run, "norms", () => new Chart({title: "Gradient norms by block", about: run.state.name, swatch: `var(--${run.variable})`, format: plain, axisFormat: short, view, log: true}));
const drawNorms = run => {
  const blocks = Object.entries(run.blocks).filter(([, each]) => each.x.length);
  blocks.forEach((_, index) => shade(`block-${run.index}-${index}`, index, blocks.length));
  normsOf(run).update(blocks.map(([name, each], index) => ({label: name.slice(6), colour: `block-${run.index}-${index}`, x: each.x, y: each.y, width: 1.2})));
};
// A gradient of colours from the first block to the last.
const shade = (name, index, number) => document.documentElement.style.setProperty(`--${name}`, `hsl(${Math.round(215 + 150 * index / Math.max(1, number - 1))} 62% ${matchDark() ? 68 : 44}%)`);
const matchDark = () => {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

// -- the page

const panel = (id, title, about) => {
  const grid = h("div", {class: "grid"}), element = h("section", {class: "panel", id}, h("h2", {}, title), about ? h("p", {}, about) : null, grid);
  byId("panels").append(element);
  byId("nav").append(h("a", {href: `#${id}`}, title));
  return {element, grid, link: byId("nav").lastChild};
};

const build = () => {
  panels.compare = new Compare(view, found => { divergences = found; CHART_SPECS.forEach(spec => spec.chart.redraw()); });
  if (runs.length > 1) {
    byId("panels").append(panels.compare.element);
    byId("nav").append(h("a", {href: "#compare"}, "Side by side"));
  }
  panels.steps = panel("steps", "Steps", "Triangles mark checkpoints, dashed lines restarts. Drag to zoom in. Charts of many steps keep the minimum and maximum of neighboring steps, so spikes stay visible.");
  for (const spec of CHART_SPECS) {
    spec.chart = new Chart({...spec, view, marks});
    panels.steps.grid.append(spec.chart.element);
  }
  panels.time = panel("time", "Time", "Seconds of rank 0 by phase. Of many steps, the fastest and slowest of neighboring steps are shown.");
  panels.norms = panel("norms", "Blocks", "Gradient norms by block, in measured steps.");
  panels.ranks = panel("ranks", "Ranks", "Memory and seconds of each rank over its last steps.");
  panels.ranks.grid.classList.add("pairs");
  panels.pipeline = panel("pipeline", "Pipeline", "What each rank computes when. Numbers are micro-batches; stages after the rank's first are paler.");
  panels.events = panel("events", "Events");
};

const showCards = ({element, grid, link}, cards) => {
  element.hidden = link.hidden = !cards.length;
  if (cards.length !== grid.children.length || cards.some((card, index) => grid.children[index] !== card)) grid.replaceChildren(...cards);
};

// Let the browser handle input between charts.
let drawingSince = 0;
const yieldToBrowser = async () => {
  if (performance.now() - drawingSince < 12) return;
  await new Promise(resolve => setTimeout(resolve));
  drawingSince = performance.now();
};

const draw = async () => {
  const visible = shown();
  drawingSince = performance.now();
  for (const spec of CHART_SPECS) {
    const has = !spec.needs || visible.some(run => names(run, spec.needs).length);
    spec.chart.element.hidden = !has;
    if (has) spec.chart.update(visible.flatMap(run => spec.lines(run)));
    await yieldToBrowser();
  }
  const timed = visible.filter(run => names(run, "times/").length), normed = visible.filter(run => names(run, "norms/").length);
  showCards(panels.time, timed.map(run => splitOf(run).element));
  for (const run of timed) { drawSplit(run); await yieldToBrowser(); }
  showCards(panels.norms, normed.map(run => normsOf(run).element));
  for (const run of normed) { drawNorms(run); await yieldToBrowser(); }
  showCards(panels.ranks, visible.filter(run => run.own?.ranks?.found?.ranks.length).flatMap(run => run.own.ranks.elements));
  showCards(panels.pipeline, visible.filter(run => run.own?.timeline?.found).map(run => run.own.timeline.element));
  drawEvents(visible);
  charts = [...CHART_SPECS.map(spec => spec.chart), panels.compare.chart,
    ...runs.flatMap(run => Object.values(run.own || {}).flatMap(each => each.charts ? each.charts() : [each]))];
};

const drawEvents = visible => {
  const reported = visible.flatMap(run => run.events.map(event => ({run, event}))).sort((a, b) => (b.event.time || 0) - (a.event.time || 0));
  const mark = reported.length + ":" + visible.map(run => run.index);
  if (mark === panels.events.mark) return;
  panels.events.mark = mark;
  const rows = reported.slice(0, 200).map(({run, event}) => [new Date(1000 * (event.time || 0)).toLocaleString(), h("span", {class: "name"}, h("span", {class: "swatch", colour: `var(--${run.variable})`}), run.state.name),
    event.event === "start" && event.start_step > 0 ? "restart" : event.event, typeof (event.step ?? event.start_step) === "number" ? count(event.step ?? event.start_step) : "", words(event)]);
  showCards(panels.events, rows.length ? [h("figure", {class: "card"}, table(reported.length > 200 ? `The latest 200 of ${count(reported.length)}` : `${count(reported.length)} event${reported.length > 1 ? "s, the latest first" : ""}`, ["time", "run", "event", "step", "details"], rows, {texts: [0, 1, 2, 4], wraps: [4]}))] : []);
};
const words = event => {
  if (event.event === "evaluation") return Object.entries(event.losses || {}).map(([name, loss]) => `${name} ${plain(loss)}`).join(", ");
  if (event.event === "checkpoint") return [event.path, typeof event.seconds === "number" && `paused training for ${seconds(event.seconds)}`, event.is_best && "among the best"].filter(Boolean).join("; ");
  if (event.event === "fault") return `rank ${event.rank}: ${event.error_type}: ${event.message}`;
  if (event.event === "start") return `${event.strategy}, ${event.mesh}, after step ${event.start_step} of ${event.num_steps}`;
  if (event.event === "end") return `${event.reason}, after ${seconds(event.seconds)}`;
  return event.event === "exit" ? `code ${event.code}` : "";
};

// -- polling

const poll = async () => {
  let more = false;
  if (!isPaused && !document.hidden) {
    try {
      const found = await fetchJson("state");
      more = found.more;
      if (!runs.length) { found.runs.forEach((_, index) => runs.push(new Run(index))); byId("runs").replaceChildren(...runs.map(run => run.card)); runs.forEach((run, index) => run.state = found.runs[index]); build(); }
      found.runs.forEach((state, index) => { runs[index].state = state; runs[index].updateCard(); });
      document.title = runs.map(run => run.state.name).join(", ") + " · meshwright watch";
      live(found.runs.some(run => run.state === "running") ? "live" : "no run is active");
      // While a long file is read in parts, draw only from time to time.
      if (!more || Date.now() - drawnAt > EVERY_MS) {
        await refresh({});
        drawnAt = Date.now();
      }
    } catch (error) {
      console.error(error);
      live("no response from meshwright watch; retrying");
    }
  }
  setTimeout(poll, more ? 0 : EVERY_MS);
};
const live = words => { const text = isPaused ? "paused" : words; if (byId("live").textContent !== text) byId("live").textContent = text; };

// Load new data, or all. Calls do not overlap: a request for all that comes meanwhile is served afterwards.
const refresh = async ({all = false}) => {
  if (isBusy) { isStale ||= all; return; }
  isBusy = true;
  try {
    let again = all;
    do {
      isStale = false;
      const visible = shown();
      const news = visible.filter(run => again || run.seen.metrics !== run.state.versions.metrics);
      await Promise.all(visible.flatMap(run => {
        const {versions} = run.state, jobs = [];
        if (news.includes(run)) { run.seen.metrics = versions.metrics; jobs.push(run.load()); }
        if (run.seen.events !== versions.events) { run.seen.events = versions.events; jobs.push(run.loadEvents()); }
        if (run.state.has_ranks && Date.now() - run.ranksAt > ((run.state.world_size || 1) > 64 ? MANY_RANKS_EVERY_MS : RANKS_EVERY_MS) && (run.state.state === "running" || !run.ranksAt)) {
          run.ranksAt = Date.now();
          jobs.push(fetchJson("ranks", {run: run.index}).then(found => {
            const ranks = own(run, "ranks", () => new Ranks(run, `var(--${run.variable})`, run.state.name, view, () => ({points: points(), ...span()})));
            ranks.update(found);
            return ranks.load();
          }));
        } else if (again && run.own?.ranks) jobs.push(run.own.ranks.load());
        if (run.state.has_timeline && run.seen.timeline !== versions.timeline) {
          run.seen.timeline = versions.timeline;
          jobs.push(loadTimeline(run));
        }
        return jobs;
      }));
      if (news.length || again || !panels.isDrawn) await panels.compare.update(visible);
      panels.isDrawn = true;
      await draw();
      again = true;
    } while (isStale);
  } finally { isBusy = false; }
};

const loadTimeline = async run => {
  const timeline = own(run, "timeline", () => new Timeline(`var(--${run.variable})`, run.state.name, step => { run.timelineStep = step; loadTimeline(run); }));
  timeline.update(await fetchJson("timeline", {run: run.index, step: run.timelineStep ?? null}));
};

let waiting = null;
view.listeners.push(async range => {
  byId("all").hidden = !range;
  clearTimeout(waiting);
  waiting = setTimeout(() => refresh({all: true}).catch(console.error), 120);
  for (const chart of charts) {
    if (view.range !== range) return;
    if (chart.options?.view && chart.drawn) chart.rescale();
    await new Promise(resolve => setTimeout(resolve));
  }
});
byId("all").addEventListener("click", () => view.set(null));

// -- theme and keys

const THEMES = ["system", "light", "dark"];
let stored = null;
try { stored = localStorage.getItem("meshwright-theme"); } catch { /* Storage is not available. */ }
const setTheme = theme => {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  try { localStorage.setItem("meshwright-theme", theme); } catch { /* Storage is not available. */ }
  repaint();
};
const repaint = () => { forgetColours(); runs.filter(run => run.own?.norms && run.isShown).forEach(drawNorms); charts.forEach(chart => chart.redraw?.()); };
const nextTheme = () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme || "system") + 1) % 3]);
byId("theme").addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
setTheme(THEMES.includes(stored) ? stored : "system");

const help = byId("help");
byId("keys").addEventListener("click", () => help.showModal());
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (help.open) return;
  if (event.key === "?") help.showModal();
  else if (event.key === "d") nextTheme();
  else if (event.key === "0") view.set(null);
  else if (event.key === "p") { isPaused = !isPaused; live("live"); }
  else if (/^[1-9]$/.test(event.key) && runs[event.key - 1]) runs[event.key - 1].toggle();
  else return;
  event.preventDefault();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh({all: true}).catch(console.error); });
poll();
