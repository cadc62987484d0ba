// Runs beside a first one: the first step that differs, how much they differ, and what their run files say differently.

import {h, ask, count, exact, table} from "./dom.js";
import {Chart} from "./chart.js";

const NAMES = {loss: "loss", grad_norm: "gradient norm"};

export class Compare {
  // runs: the page's; see page.js
  constructor(view, onParted) {
    this.view = view;
    this.onParted = onParted;
    this.steps = h("div");
    this.settings = h("div");
    this.chart = new Chart({title: "Relative difference", about: "of the loss and of the gradient norm, to the first run", view, log: true,
      format: value => value === null || value === undefined ? "–" : value === 0 ? "0" : value.toExponential(2)});
    this.card = h("figure", {class: "card"}, h("header", {}, h("h3", {}, "First differing step")), this.steps, this.settings);
    this.element = h("section", {class: "panel", id: "compare"}, h("h2", {}, "Side by side"),
      h("p", {}, "Numbers of the same step, compared bit by bit with those of the first run that is shown. Sums in another order differ by 1e-7 or so for many steps; runs part at the first step in which they differ by more than 1e-6, relatively."),
      h("div", {class: "grid pairs"}, this.card, this.chart.element));
  }

  async update(shown) {
    this.element.hidden = shown.length < 2;
    if (shown.length < 2) return this.onParted(new Map());
    const [one, ...others] = shown, [from, to] = this.view.range ?? [null, null];
    const span = from === null ? {} : {from: Math.floor(from), to: Math.ceil(to)};
    const found = await Promise.all(others.map(other => ask("compare", {one: one.place, other: other.place, ...span})));
    const rows = [], series = [], parted = new Map();
    others.forEach((other, place) => {
      for (const [name, said] of Object.entries(found[place].columns)) {
        rows.push([this.name(other), NAMES[name], count(said.steps), this.at(said.first, said.steps), this.at(said.diverged, said.steps),
          said.max_difference === 0 ? "0" : said.max_difference === null ? "not finite" : said.max_difference.toExponential(2)]);
        if (said.x.length) series.push({label: `${other.state.name}: ${NAMES[name]}`, colour: other.variable, dashed: name !== "loss", x: said.x, y: said.y});
      }
      const first = Object.values(found[place].columns).map(each => each.first).filter(Boolean).sort((a, b) => a.step - b.step)[0];
      if (first) parted.set(first.step, parted.has(first.step) ? `${parted.get(first.step)}, ${other.state.name}` : `differs: ${other.state.name}`);
    });
    this.steps.replaceChildren(table(`Beside ${one.state.name}`, ["run", "column", "steps", "differs from", "parts from", "at most"], rows, {texts: [0, 1]}));
    this.settings.replaceChildren(...others.map((other, place) => found[place].settings.length
      ? table(`Run files: ${one.state.name} and ${other.state.name}`, ["key", one.state.name, other.state.name], found[place].settings, {texts: [0, 1, 2], wraps: [1, 2]})
      : h("p", {class: "said"}, `The run files of ${one.state.name} and ${other.state.name} say the same.`)));
    this.chart.update(series);
    this.onParted(parted);
  }

  name(run) { return h("span", {class: "name"}, h("span", {class: "swatch", colour: `var(--${run.variable})`}), run.state.name); }

  at(difference, steps) {
    if (!steps) return "–";
    if (!difference) return h("span", {class: "equal"}, "none");
    const {step, one, other} = difference;
    return h("button", {type: "button", class: "differs", title: `${exact(one)} and ${exact(other)}`, onclick: () => this.view.set([Math.max(0, step - 12), step + 12])}, `step ${count(step)}`);
  }
}
