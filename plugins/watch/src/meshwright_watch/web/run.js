// One run: its card, and its data.

import {h, fetchJson} from "./dom.js";
import {AXES, count, nearest, percent, plain, seconds, short} from "./numbers.js";
import {CHART_SPECS} from "./specs.js";
import {names, points, view, query} from "./state.js";

const STATES = {running: "running", done: "done", failed: "failed", lost: "ended", stopped: "stopped", waiting: "waiting"};

export class Run {
  // onToggle: called when the run is shown or hidden
  constructor(index, onToggle) {
    this.index = index;
    this.onToggle = onToggle;
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
    this.why.className = state.state === "waiting" ? "why" : "why bad";
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
    this.onToggle();
  }

  async load() {
    const {state} = this, {axis} = view, has = name => state.names.includes(name), request = {run: this.index, ...query()};
    const drawn = [...new Set(CHART_SPECS.flatMap(spec => spec.names(this)))].filter(has);
    const smooths = view.smoothing ? CHART_SPECS.flatMap(spec => spec.smooths ?? []).filter(has) : [];
    const parts = names(this, "times/"), norms = names(this, "norms/");
    const [series, smoothed, split, blocks] = await Promise.all([
      fetchJson("series", {...request, name: drawn.filter(name => !smooths.includes(name))}),
      smooths.length ? fetchJson("series", {...request, name: smooths, smoothing: view.smoothing}) : {},
      fetchJson("series", {...request, points: Math.round(points() / 2), by: "seconds", name: ["seconds", ...parts]}),
      norms.length ? fetchJson("series", {...request, points: 300, name: norms.slice(0, 400)}) : {},
    ]);
    this.axis = axis;
    this.series = {...series, ...smoothed};
    this.split = split;
    this.blocks = blocks;
  }

  // The position of a step on the x axis; null: not among the loaded steps.
  position(step) {
    if (this.axis === AXES.step) return step;
    const {at, x} = this.series.loss ?? {};
    return at && x.length && step >= at[0] && step <= at.at(-1) ? x[nearest(at, step)] : null;
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
