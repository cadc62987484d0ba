// Memory and seconds by rank of one run, stragglers, and the history of one rank.

import {h, fetchJson, table} from "./dom.js";
import {KINDS, count, seconds} from "./numbers.js";
import {Chart} from "./chart.js";

const MEMORY = {
  allocated_peak: "allocated, peak", allocated: "allocated", reserved_peak: "reserved, peak", reserved: "reserved",
  host_peak: "host, peak", host: "host",
};
const words = part => part === "seconds" ? "full step" : part.replaceAll("_", " ");

export class Ranks {
  // window: returns the shown range of steps and the number of points
  constructor(run, swatch, names, view, window) {
    this.run = run;
    this.window = window;
    this.rank = null;
    this.column = "seconds";
    this.part = null;
    this.kind = null;
    this.parts = h("select", {"aria-label": "Phase of the step", onchange: () => { this.part = this.parts.value; this.show(); }});
    this.kinds = h("select", {"aria-label": "Kind of memory", onchange: () => { this.kind = this.kinds.value; this.show(); }});
    this.time = new Chart({title: "Seconds by rank", about: names, y: "time of a step", kind: KINDS.seconds, swatch, tools: [this.parts], fromZero: true});
    this.memory = new Chart({title: "Memory by rank", about: names, y: "memory", kind: KINDS.bytes, swatch, tools: [this.kinds], bars: true});
    this.which = h("input", {type: "number", min: 0, "aria-label": "Rank to show over its steps",
      onchange: () => this.choose(this.which.value === "" ? null : Number(this.which.value))});
    this.columns = h("select", {"aria-label": "Metric of the rank", onchange: () => { this.column = this.columns.value; this.showRank(); }});
    this.one = new Chart({title: "One rank over its steps", about: names, kind: KINDS.seconds, view, swatch, tools: [this.which, this.columns],
      fromZero: true, empty: "enter the number of a rank"});
    this.one.element.classList.add("wide");
    this.columns.hidden = true;
    this.one.update([]);
    this.slow = h("div");
    this.elements = [this.memory.element, this.time.element, this.one.element];
    this.time.element.append(this.slow);
  }

  fill(select, names, chosen, text) {
    if ([...select.options].map(each => each.value).join() !== names.join())
      select.replaceChildren(...names.map(name => h("option", {value: name}, text(name))));
    select.value = chosen;
  }

  update(found) {
    this.found = found;
    const kinds = Object.keys(MEMORY).filter(kind => kind in found.memory);
    if (!kinds.includes(this.kind)) this.kind = kinds[0];
    const parts = Object.keys(found.parts);
    if (!parts.includes(this.part)) this.part = found.stragglers[0]?.phase ?? parts[0];
    this.fill(this.kinds, kinds, this.kind, kind => MEMORY[kind]);
    this.fill(this.parts, parts, this.part, words);
    this.show();
  }

  show() {
    const {found} = this, ranks = found.ranks;
    if (this.kind) this.memory.update([{label: MEMORY[this.kind], colour: "run-0", x: ranks, y: found.memory[this.kind]}]);
    const part = found.parts[this.part], slow = found.stragglers.filter(each => each.phase === this.part);
    if (part) {
      const many = ranks.length > 64;
      this.time.update([
        {label: `median of ${found.last} steps`, colour: "run-0", x: ranks, y: part.median, dots: many ? 3 : 7},
        {label: "fastest", colour: "run-5", x: ranks, y: part.low, dots: many ? 2 : 4},
        {label: "slowest", colour: "run-1", x: ranks, y: part.high, dots: many ? 2 : 4},
        ...(slow.length ? [{label: "stragglers", colour: "bad", x: slow.map(each => each.rank).sort((a, b) => a - b),
          y: [...slow].sort((a, b) => a.rank - b.rank).map(each => each.seconds), dots: 10}] : []),
      ]);
    }
    const all = found.stragglers, focused = this.slow.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.slow.replaceChildren(all.length
      ? table(`Stragglers: ${all.length === 100 ? "the first 100" : count(all.length)}. Their medians exceed that of all ranks by 3.5 scaled median absolute deviations and by 2 % of a step`,
        ["rank", "phase", "median", "median of all ranks", "deviations"],
        all.map(each => [h("button", {type: "button", title: "show the history of this rank", onclick: () => this.choose(each.rank, each.phase)}, count(each.rank)), words(each.phase), seconds(each.seconds), seconds(each.median), each.deviations === null ? "others are equal" : each.deviations.toFixed(1)]), {texts: [1]})
      : h("p", {class: "said"}, ranks.length < 4 ? "Stragglers are reported for four ranks or more." : `No stragglers among ${count(ranks.length)} ranks.`));
    if (focused) [...this.slow.querySelectorAll("button")].find(button => button.textContent === focused)?.focus({preventScroll: true});
  }

  choose(rank, part) {
    this.rank = rank;
    if (part) this.column = part === "seconds" ? part : `times/${part}`;
    this.which.value = rank ?? "";
    return this.load();
  }

  // Load the history of the chosen rank, if there is one.
  async load() {
    const {rank} = this;
    if (rank === null || !this.found?.ranks.includes(rank)) {
      this.one.options.empty = rank === null ? "enter the number of a rank" : `rank ${rank} has written nothing`;
      this.history = {};
    } else {
      const {series} = await fetchJson("rank", {run: this.run.index, rank, ...this.window()});
      if (rank !== this.rank) return;
      this.history = series;
    }
    this.showRank();
  }

  showRank() {
    const names = Object.keys(this.history);
    this.columns.hidden = !names.length;
    if (names.length && !names.includes(this.column)) this.column = names[0];
    const isMemory = this.column.startsWith("memory/");
    Object.assign(this.one.options, {kind: isMemory ? KINDS.bytes : KINDS.seconds, y: isMemory ? "memory" : "time"});
    this.fill(this.columns, names, this.column, name => words(name.replace("times/", "").replace("memory/", "memory: ")));
    this.one.update(names.length ? [{label: `rank ${count(this.rank)}: ${this.columns.selectedOptions[0].textContent}`, colour: "run-0", ...this.history[this.column]}] : []);
  }

  charts() { return [this.time, this.memory, this.one]; }
}
