// The page: polls for new data every second, and draws the shown runs.

import {h, fetchJson, forgetColours, table} from "./dom.js";
import {AXES, KINDS, count, plain, seconds} from "./numbers.js";
import {Chart} from "./chart.js";
import {Compare} from "./compare.js";
import {divergences, marks} from "./marks.js";
import {Ranks} from "./ranks.js";
import {Run} from "./run.js";
import {Settings} from "./settings.js";
import {CHART_SPECS} from "./specs.js";
import {names, runs, shown, view, query} from "./state.js";
import {Timeline} from "./timeline.js";

const EVERY_MS = 1000, RANKS_EVERY_MS = 2000, MANY_RANKS_EVERY_MS = 6000;
const byId = id => document.getElementById(id);
const PARTS = [["data", "part-data"], ["forward_backward", "part-forward"], ["norms", "run-2"], ["clip", "part-clip"],
  ["read", "part-communication"], ["optimizer", "part-optimizer"],
  ["rest", "part-rest"], ["save", "part-save"], ["evaluation", "part-evaluation"]];

const panels = {};
let isPaused = false, isBusy = false, isStale = false, charts = [], drawnAt = 0;

// -- panels of each run

const own = (run, what, make) => (run.own ??= {})[what] ??= make();

const splitOf = run => own(run, "split", () => new Chart({title: "Time of a step", about: run.state.name, y: "time", swatch: `var(--${run.variable})`, kind: KINDS.seconds, view, stacked: true, hides: ["evaluation"]}));
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
const normsOf = run => own(run, "norms", () => new Chart({title: "Gradient norms by block", about: run.state.name, y: "gradient norm", swatch: `var(--${run.variable})`, view, log: true}));
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
  panels.compare = new Compare(view, query, found => {
    divergences.clear();
    found.forEach((text, step) => divergences.set(step, text));
    CHART_SPECS.forEach(spec => spec.chart.redraw());
  });
  if (runs.length > 1) {
    byId("panels").append(panels.compare.element);
    byId("nav").append(h("a", {href: "#compare"}, "Side by side"));
  }
  panels.steps = panel("steps", "Steps", "Triangles mark checkpoints, dashed lines restarts. Drag to zoom in. Charts of many steps keep the minimum and maximum of neighboring steps, so spikes stay visible.");
  for (const spec of CHART_SPECS) {
    spec.chart = new Chart({...spec, view, marks});
    panels.steps.grid.append(spec.chart.element);
  }
  panels.steps.about = panels.steps.element.querySelector("p");
  panels.steps.note = h("p", {role: "status"});
  panels.steps.grid.before(panels.steps.note);
  panels.time = panel("time", "Time", "Seconds of rank 0 by phase. Of many steps, the fastest and slowest of neighboring steps are shown.");
  panels.norms = panel("norms", "Blocks", "Gradient norms by block, in measured steps.");
  panels.ranks = panel("ranks", "Ranks", "Memory and seconds of each rank over its last steps.");
  panels.ranks.grid.classList.add("pairs");
  panels.pipeline = panel("pipeline", "Pipeline", "What each rank computes when. Numbers are micro-batches; stages after the rank's first are paler.");
  panels.settings = panel("settings", "Settings", "Of the run file, with the defaults where they differ.");
  panels.settings.grid.classList.add("pairs");
  panels.events = panel("events", "Events");
};

// What to draw when there is nothing to draw yet.
const explainEmpty = visible => {
  if (!visible.length) return "All runs are hidden: select one above.";
  return visible.some(run => run.state.names.length) ? "" : "No steps yet. The charts appear when the first step has ended.";
};
const explainEvaluations = visible => {
  if (visible.some(run => names(run, "evaluations/").length)) return "";
  const every = visible.map(run => run.state.eval_every).filter(Boolean);
  return every.length ? `No evaluation yet: the first is after step ${count(Math.min(...every))}.`
    : visible.some(run => run.state.has_settings) ? "No evaluations: the run file does not set eval.every." : "";
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
  const empty = explainEmpty(visible);
  panels.steps.note.textContent = empty || explainEvaluations(visible);
  for (const element of [panels.steps.about, panels.steps.grid, byId("view")]) element.hidden = Boolean(empty);
  for (const spec of CHART_SPECS) {
    const has = !empty && (!spec.needs || visible.some(run => names(run, spec.needs).length));
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
  showCards(panels.settings, visible.filter(run => run.own?.settings?.found).map(run => run.own.settings.element));
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
      if (!runs.length) { found.runs.forEach((_, index) => runs.push(new Run(index, () => refresh({all: true}).catch(console.error)))); byId("runs").replaceChildren(...runs.map(run => run.card)); runs.forEach((run, index) => run.state = found.runs[index]); build(); }
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
      const visible = shown(), {axis} = view;
      const news = visible.filter(run => again || run.seen.metrics !== run.state.versions.metrics);
      await Promise.all(visible.flatMap(run => {
        const {versions} = run.state, jobs = [];
        if (news.includes(run)) { run.seen.metrics = versions.metrics; jobs.push(run.load()); }
        if (run.seen.events !== versions.events) { run.seen.events = versions.events; jobs.push(run.loadEvents()); }
        if (run.state.has_ranks && Date.now() - run.ranksAt > ((run.state.world_size || 1) > 64 ? MANY_RANKS_EVERY_MS : RANKS_EVERY_MS) && (run.state.state === "running" || !run.ranksAt)) {
          run.ranksAt = Date.now();
          jobs.push(fetchJson("ranks", {run: run.index}).then(found => {
            const ranks = own(run, "ranks", () => new Ranks(run, `var(--${run.variable})`, run.state.name, view, query));
            ranks.update(found);
            return ranks.load();
          }));
        } else if (again && run.own?.ranks) jobs.push(run.own.ranks.load());
        if (run.state.has_timeline && run.seen.timeline !== versions.timeline) {
          run.seen.timeline = versions.timeline;
          jobs.push(loadTimeline(run));
        }
        if (run.state.has_settings && run.seen.settings !== versions.settings) {
          run.seen.settings = versions.settings;
          jobs.push(fetchJson("settings", {run: run.index}).then(found =>
            own(run, "settings", () => new Settings(`var(--${run.variable})`, run.state.name)).update(found)));
        }
        return jobs;
      }));
      if (news.length || again || !panels.isDrawn) await panels.compare.update(visible);
      // Do not draw lines of one x axis over another.
      if (axis !== view.axis) { again = isStale = true; continue; }
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
  byId("axis").value = view.axis.name;
  byId("weight").textContent = view.smoothing ? view.smoothing.toFixed(2) : "off";
  clearTimeout(waiting);
  waiting = setTimeout(() => refresh({all: true}).catch(console.error), 120);
  for (const chart of charts) {
    if (view.range !== range) return;
    if (chart.options?.view && chart.drawn) chart.rescale();
    await new Promise(resolve => setTimeout(resolve));
  }
});
byId("all").addEventListener("click", () => view.set(null));
byId("axis").addEventListener("change", event => view.set(null, AXES[event.target.value]));
byId("smoothing").addEventListener("input", event => {
  view.smoothing = Number(event.target.value);
  view.set(view.range);
});

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
