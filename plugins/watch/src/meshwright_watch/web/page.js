// The page: asks for news every second, and draws what is new of the runs that are shown.

import {h, ask, colour, forgetColours, count, short, plain, seconds, bytes, percent, table} from "./dom.js";
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
let parted = new Map(), isPaused = false, isBusy = false, isStale = false, charts = [], drawnAt = 0;

// -- pictures of all runs that are shown

const lines = (name, label) => run => run.series[name] ? [{label: label(run), colour: run.variable, ...run.series[name]}] : [];
const only = run => run.state.name;

// Checkpoints, restarts, faults and the first differing steps; with words, each word in a row where it hides no other.
const marks = (u, hasLabels) => {
  const rows = [];
  const say = (words, x) => {
    if (!hasLabels) return;
    const wide = pen.measureText(words).width + 10 * ratio, isLeft = x + wide > bbox.left + bbox.width, from = isLeft ? x - wide : x;
    let row = rows.findIndex(last => last.every(([low, high]) => from >= high || from + wide <= low));
    if (row < 0) row = rows.push([]) - 1;
    rows[row].push([from, from + wide]);
    pen.textAlign = isLeft ? "right" : "left";
    // On a ground of its own, so that lines do not run through it.
    const ink = pen.strokeStyle;
    pen.strokeStyle = colour("card");
    pen.setLineDash([]);
    pen.lineWidth = 4 * ratio;
    pen.lineJoin = "round";
    pen.strokeText(words, x + (isLeft ? -5 : 5) * ratio, bbox.top + (9 + 14 * row) * ratio);
    pen.strokeStyle = ink;
    pen.fillText(words, x + (isLeft ? -5 : 5) * ratio, bbox.top + (9 + 14 * row) * ratio);
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
      // Where they would hide each other, some stand for all.
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
    say(event.kind, x);
  } }
  for (const [step, words] of parted) {
    pen.setLineDash([2 * ratio, 2 * ratio]);
    if (step < min || step > max) continue;
    const x = at(step);
    pen.strokeStyle = pen.fillStyle = colour("text");
    pen.lineWidth = 1.4 * ratio;
    pen.beginPath();
    pen.moveTo(x, bbox.top);
    pen.lineTo(x, bbox.top + bbox.height);
    pen.stroke();
    say(words, x);
  }
  pen.restore();
};

const PICTURES = [
  {title: "Loss", about: "nats per token, or the objective's own", format: plain, labels: true, lines: run => [
    ...lines("loss", only)(run),
    ...names(run, "evaluations/").flatMap(name => lines(name, () => `${run.state.name}: ${name.slice(12).replaceAll("_", "-")}`)(run)
      .map(each => ({...each, dots: run.series[name].count > 60 ? 4 : 7}))),
  ], names: run => ["loss", ...names(run, "evaluations/")]},
  {title: "Gradient norm", about: "before clipping", format: plain, lines: lines("grad_norm", only), names: () => ["grad_norm"]},
  {title: "Learning rate", about: "by parameter group", format: plain, axisFormat: short, fromZero: true, lines: run => {
    const groups = names(run, "learning_rates/");
    return groups.length > 1 ? groups.slice(0, 6).flatMap((name, place) => lines(name, () => `${run.state.name}: ${name.slice(15)}`)(run).map(each => ({...each, dashed: place % 2 === 1})))
      : lines("learning_rate", only)(run);
  }, names: run => ["learning_rate", ...names(run, "learning_rates/").slice(0, 6)]},
  {title: "Tokens per second", about: "of all ranks", format: short, fromZero: true, lines: lines("tokens_per_second", only), names: () => ["tokens_per_second"]},
  {title: "Model FLOPs utilization", about: "of the devices' peak", format: percent, fromZero: true, lines: lines("mfu", only), names: () => ["mfu"], needs: "mfu"},
  {title: "Exposed communication", about: "of rank 0, in steps that measure it", format: seconds, axisFormat: seconds, fromZero: true,
    lines: lines("times/exposed_communication", only), names: () => ["times/exposed_communication"], needs: "times/exposed_communication"},
  {title: "Memory", about: "of rank 0; dashed: now", format: bytes, isBytes: true, fromZero: true, lines: run => {
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
  constructor(place) {
    this.place = place;
    this.variable = `run-${place % 8}`;
    this.isShown = true;
    this.series = {};
    this.split = {x: [], columns: {}};
    this.marks = [];
    this.events = [];
    this.seen = {};
    this.ranksAt = 0;
    this.card = h("article", {class: "run", colour: `var(--${this.variable})`});
  }

  // One card: a button that shows and hides, what the run is, and its last numbers.
  tell() {
    const {state} = this, {last} = state;
    if (!this.button) {
      this.button = h("button", {type: "button", title: "show or hide its lines", onclick: () => this.toggle()});
      this.badge = h("span", {class: "badge"});
      this.about = h("p", {class: "about"});
      this.why = h("p", {class: "why"});
      this.bar = h("progress", {"aria-label": "Steps done"});
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
      last.mfu !== undefined ? ["MFU", percent(last.mfu)] : ["tokens/s", short(last.tokens_per_second)], left !== null ? ["left", seconds(left)] : ["step takes", seconds(last.seconds)]];
    this.facts.replaceChildren(...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    const [read, size] = state.read;
    this.note.textContent = [size - read > 1 << 20 && `reading: ${percent(read / size)}`, state.num_unreadable && `${count(state.num_unreadable)} lines of metrics cannot be read, and are left out`,
      state.has_omitted_columns && "there are more columns than can be shown"].filter(Boolean).join("; ");
    this.note.hidden = !this.note.textContent;
  }

  toggle() {
    this.isShown = !this.isShown;
    this.tell();
    refresh({all: true});
  }

  async load() {
    const {state} = this, wanted = [...new Set(PICTURES.flatMap(picture => picture.names(this)))].filter(name => state.names.includes(name));
    const parts = names(this, "times/"), own = {run: this.place, points: points(), ...span()}, norms = names(this, "norms/");
    const [series, split, blocks] = await Promise.all([
      ask("series", {...own, name: wanted}),
      ask("series", {...own, points: Math.round(points() / 2), by: "seconds", name: ["seconds", ...parts]}),
      norms.length ? ask("series", {...own, points: 300, name: norms.slice(0, 400)}) : {},
    ]);
    this.series = series;
    this.split = split;
    this.blocks = blocks;
  }

  async loadEvents() {
    this.events = await ask("events", {run: this.place});
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
      ? (columns.seconds || []).map((whole, place) => whole === null ? null : Math.max(0, whole - ["data", "forward_backward", "norms", "clip", "read", "optimizer"].reduce((sum, part) => sum + (found(part)?.[place] || 0), 0)))
      : found(name);
    if (y?.some(value => value > 0)) series.push({label: name.replaceAll("_", " "), colour: variable, x, y});
  }
  splitOf(run).update(series);
};
const normsOf = run => own(run, "norms", () => new Chart({title: "Gradient norms by block", about: run.state.name, swatch: `var(--${run.variable})`, format: plain, axisFormat: short, view, log: true}));
const drawNorms = run => {
  const blocks = Object.entries(run.blocks).filter(([, each]) => each.x.length);
  blocks.forEach((_, place) => shade(`block-${run.place}-${place}`, place, blocks.length));
  normsOf(run).update(blocks.map(([name, each], place) => ({label: name.slice(6), colour: `block-${run.place}-${place}`, x: each.x, y: each.y, width: 1.2})));
};
// From the first block to the last, one colour into another.
const shade = (name, place, number) => document.documentElement.style.setProperty(`--${name}`, `hsl(${Math.round(215 + 150 * place / Math.max(1, number - 1))} 62% ${matchDark() ? 68 : 44}%)`);
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
  panels.compare = new Compare(view, found => { parted = found; PICTURES.forEach(picture => picture.chart.redraw()); });
  if (runs.length > 1) {
    byId("panels").append(panels.compare.element);
    byId("nav").append(h("a", {href: "#compare"}, "Side by side"));
  }
  panels.steps = panel("steps", "Steps", "Triangles are checkpoints; dashed lines restarts. Drag to see steps closer. Of many steps the lowest and the highest of each few are drawn, so no spike is lost.");
  for (const picture of PICTURES) {
    picture.chart = new Chart({...picture, view, marks});
    panels.steps.grid.append(picture.chart.element);
  }
  panels.time = panel("time", "Time", "Where the seconds of rank 0 go, of steps as they were: the fastest and the slowest of each few.");
  panels.norms = panel("norms", "Blocks", "Norms of the gradients by block, in the steps that measure them.");
  panels.ranks = panel("ranks", "Ranks", "What each rank says of itself, over the last steps.");
  panels.ranks.grid.classList.add("pairs");
  panels.pipeline = panel("pipeline", "Pipeline", "What each rank computes when; a number is a microbatch, and paler what is not the rank's first stage.");
  panels.events = panel("events", "Events");
};

const place = ({element, grid, link}, cards) => {
  element.hidden = link.hidden = !cards.length;
  if (cards.length !== grid.children.length || cards.some((card, index) => grid.children[index] !== card)) grid.replaceChildren(...cards);
};

// Lets the browser answer keys and pointer between pictures.
let drawingSince = 0;
const breathe = async () => {
  if (performance.now() - drawingSince < 12) return;
  await new Promise(go => setTimeout(go));
  drawingSince = performance.now();
};

const draw = async () => {
  const visible = shown();
  drawingSince = performance.now();
  for (const picture of PICTURES) {
    const has = !picture.needs || visible.some(run => names(run, picture.needs).length);
    picture.chart.element.hidden = !has;
    if (has) picture.chart.update(visible.flatMap(run => picture.lines(run)));
    await breathe();
  }
  const timed = visible.filter(run => names(run, "times/").length), normed = visible.filter(run => names(run, "norms/").length);
  place(panels.time, timed.map(run => splitOf(run).element));
  for (const run of timed) { drawSplit(run); await breathe(); }
  place(panels.norms, normed.map(run => normsOf(run).element));
  for (const run of normed) { drawNorms(run); await breathe(); }
  place(panels.ranks, visible.filter(run => run.own?.ranks?.found?.ranks.length).flatMap(run => run.own.ranks.elements));
  place(panels.pipeline, visible.filter(run => run.own?.timeline?.found).map(run => run.own.timeline.element));
  drawEvents(visible);
  charts = [...PICTURES.map(picture => picture.chart), panels.compare.chart,
    ...runs.flatMap(run => Object.values(run.own || {}).flatMap(each => each.charts ? each.charts() : [each]))];
};

const drawEvents = visible => {
  const reported = visible.flatMap(run => run.events.map(event => ({run, event}))).sort((a, b) => (b.event.time || 0) - (a.event.time || 0));
  const mark = reported.length + ":" + visible.map(run => run.place);
  if (mark === panels.events.mark) return;
  panels.events.mark = mark;
  const rows = reported.slice(0, 200).map(({run, event}) => [new Date(1000 * (event.time || 0)).toLocaleString(), h("span", {class: "name"}, h("span", {class: "swatch", colour: `var(--${run.variable})`}), run.state.name),
    event.event === "start" && event.start_step > 0 ? "restart" : event.event, typeof (event.step ?? event.start_step) === "number" ? count(event.step ?? event.start_step) : "", words(event)]);
  place(panels.events, rows.length ? [h("figure", {class: "card"}, table(reported.length > 200 ? `The latest 200 of ${count(reported.length)}` : `${count(reported.length)} event${reported.length > 1 ? "s, the latest first" : ""}`, ["when", "run", "what", "step", ""], rows, {texts: [0, 1, 2, 4], wraps: [4]}))] : []);
};
const words = event => {
  if (event.event === "evaluation") return Object.entries(event.losses || {}).map(([name, loss]) => `${name} ${plain(loss)}`).join(", ");
  if (event.event === "checkpoint") return [event.path, typeof event.seconds === "number" && `held the loop up for ${seconds(event.seconds)}`, event.is_best && "among the best"].filter(Boolean).join("; ");
  if (event.event === "fault") return `rank ${event.rank}: ${event.error_type}: ${event.message}`;
  if (event.event === "start") return `${event.strategy}, ${event.mesh}, after step ${event.start_step} of ${event.num_steps}`;
  if (event.event === "end") return `${event.reason}, after ${seconds(event.seconds)}`;
  return event.event === "exit" ? `code ${event.code}` : "";
};

// -- news

const poll = async () => {
  let more = false;
  if (!isPaused && !document.hidden) {
    try {
      const found = await ask("state");
      more = found.more;
      if (!runs.length) { found.runs.forEach((_, index) => runs.push(new Run(index))); byId("runs").replaceChildren(...runs.map(run => run.card)); runs.forEach((run, index) => run.state = found.runs[index]); build(); }
      found.runs.forEach((state, index) => { runs[index].state = state; runs[index].tell(); });
      document.title = runs.map(run => run.state.name).join(", ") + " · meshwright watch";
      live(found.runs.some(run => run.state === "running") ? "live" : "no run is continuing");
      // What is read bit by bit is drawn now and then.
      if (!more || Date.now() - drawnAt > EVERY_MS) {
        await refresh({});
        drawnAt = Date.now();
      }
    } catch (error) {
      console.error(error);
      live("no answer from meshwright watch; it is asked again");
    }
  }
  setTimeout(poll, more ? 0 : EVERY_MS);
};
const live = words => { const text = isPaused ? "paused" : words; if (byId("live").textContent !== text) byId("live").textContent = text; };

// Load what is new, or all; one at a time, and once more where more was asked for meanwhile.
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
          jobs.push(ask("ranks", {run: run.place}).then(found => {
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
  const shows = own(run, "timeline", () => new Timeline(`var(--${run.variable})`, run.state.name, step => { run.timelineStep = step; loadTimeline(run); }));
  shows.update(await ask("timeline", {run: run.place, step: run.timelineStep ?? null}));
};

let waiting = null;
view.listeners.push(async range => {
  byId("all").hidden = !range;
  clearTimeout(waiting);
  waiting = setTimeout(() => refresh({all: true}).catch(console.error), 120);
  for (const chart of charts) {
    if (view.range !== range) return;
    if (chart.options?.view && chart.drawn) chart.rescale();
    await new Promise(go => setTimeout(go));
  }
});
byId("all").addEventListener("click", () => view.set(null));

// -- theme and keys

const THEMES = ["system", "light", "dark"];
let stored = null;
try { stored = localStorage.getItem("meshwright-theme"); } catch { /* The browser keeps nothing. */ }
const setTheme = theme => {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  try { localStorage.setItem("meshwright-theme", theme); } catch { /* The browser keeps nothing. */ }
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
