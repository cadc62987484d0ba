// Compare runs with the first one: first differing step, size of the differences, and settings that differ.

import {h, fetchJson, table} from "./dom.js";
import {AXES, KINDS, count, exact} from "./numbers.js";
import {Chart} from "./chart.js";

const NAMES = {loss: "loss", grad_norm: "gradient norm"};

export class Compare {
  // window: returns the shown part of the x axis; onDiverged: called with a text by step, for the first differing step of
  // each run
  constructor(view, window, onDiverged) {
    this.view = view;
    this.window = window;
    this.onDiverged = onDiverged;
    this.steps = h("div");
    this.settings = h("div");
    this.chart = new Chart({title: "Relative difference", about: "of loss and gradient norm, from the first run", y: "relative difference", view, log: true,
      kind: {...KINDS.plain, format: value => value === null || value === undefined ? "–" : value === 0 ? "0" : value.toExponential(2)}});
    this.card = h("figure", {class: "card"}, h("header", {}, h("h3", {}, "First differing step")), this.steps, this.settings);
    this.element = h("section", {class: "panel", id: "compare"}, h("h2", {}, "Side by side"),
      h("p", {}, "Values of each step, compared bit for bit with those of the first shown run. Sums in another order differ by about 1e-7 for many steps. Runs diverge at the first step with a relative difference above 1e-6."),
      h("div", {class: "grid pairs"}, this.card, this.chart.element));
  }

  async update(visible) {
    const shown = visible.filter(run => run.state.names.length);
    this.element.hidden = shown.length < 2;
    if (shown.length < 2) return this.onDiverged(new Map());
    const [one, ...others] = shown;
    const results = await Promise.all(others.map(other => fetchJson("compare", {one: one.index, other: other.index, ...this.window()})));
    const rows = [], series = [], divergences = new Map();
    others.forEach((other, index) => {
      for (const [name, column] of Object.entries(results[index].columns)) {
        rows.push([this.name(other), NAMES[name], count(column.steps), this.at(column.first, column.steps), this.at(column.diverged, column.steps),
          column.max_difference === 0 ? "0" : column.max_difference === null ? "not finite" : column.max_difference.toExponential(2)]);
        if (column.x.length) series.push({label: `${other.state.name}: ${NAMES[name]}`, colour: other.variable, dashed: name !== "loss", x: column.x, y: column.y});
      }
      const first = Object.values(results[index].columns).map(each => each.first).filter(Boolean).sort((a, b) => a.step - b.step)[0];
      if (first) divergences.set(first.step, divergences.has(first.step) ? `${divergences.get(first.step)}, ${other.state.name}` : `differs: ${other.state.name}`);
    });
    this.steps.replaceChildren(table(`Compared with ${one.state.name}`, ["run", "column", "steps", "differs from", "diverges from", "at most"], rows, {texts: [0, 1], wraps: [0]}));
    this.settings.replaceChildren(...others.map((other, index) => results[index].settings.length
      ? table(`Run files: ${one.state.name} and ${other.state.name}`, ["key", one.state.name, other.state.name], results[index].settings, {texts: [0, 1, 2], wraps: [1, 2]})
      : h("p", {class: "said"}, `The run files of ${one.state.name} and ${other.state.name} have the same settings.`)));
    this.chart.update(series);
    this.onDiverged(divergences);
  }

  name(run) { return h("span", {class: "name"}, h("span", {class: "swatch", colour: `var(--${run.variable})`}), run.state.name); }

  at(difference, steps) {
    if (!steps) return "–";
    if (!difference) return h("span", {class: "equal"}, "none");
    const {step, one, other} = difference;
    return h("button", {type: "button", class: "differs", title: `${exact(one)} and ${exact(other)}`, onclick: () => this.view.set([Math.max(0, step - 12), step + 12], AXES.step)}, `step ${count(step)}`);
  }
}
