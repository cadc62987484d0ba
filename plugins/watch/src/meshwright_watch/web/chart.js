// Charts of lines, bars or dots over steps or ranks, drawn by uPlot, with a legend of the values at the cursor, a table,
// and keys.

import {h, colour, table} from "./dom.js";
import {AXES, KINDS, nearest} from "./numbers.js";

// What all charts of steps show: the x axis, its range (null: all steps), and the weight of the moving average.
export class View {
  constructor() { this.axis = AXES.step; this.range = null; this.smoothing = 0; this.listeners = []; this.sync = uPlot.sync("steps"); }
  set(range, axis = this.axis) { this.axis = axis; this.range = range; this.listeners.forEach(listener => listener(range)); }
}

const HEIGHT = 236;
const TABLE_ROWS = 200;
const FONT = "11px system-ui, sans-serif";
const FAINT = "50";

export class Chart {
  // options: title, about, y (title of the y axis), kind (of KINDS), view (null: a chart of ranks), log (scale at first),
  // stacked, bars, fromZero, marks (draws markers), labels (whether markers have labels), hides (series hidden at first),
  // tools, empty (text of a chart without data)
  constructor(options) {
    this.options = {kind: KINDS.plain, ...options};
    this.axis = AXES.rank;
    this.isLog = Boolean(options.log);
    this.series = [];
    this.hidden = new Set(options.hides || []);
    this.signature = "";
    this.cursorAt = null;
    const makeButton = (text, act, label) => h("button", {type: "button", "aria-pressed": "false", "aria-label": `${label}: ${options.title}`, onclick: act}, text);
    this.logButton = options.stacked || options.bars ? null : makeButton("log", () => this.toggleLog(), "Logarithmic scale");
    this.tableButton = makeButton("table", () => this.toggleTable(), "Numbers as a table");
    this.legend = h("ul", {class: "legend"});
    this.plot = h("div", {class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart",
      "aria-label": `${options.title}${options.about ? " (" + options.about + ")" : ""}. Arrow keys move the cursor, t shows a table.`,
      onkeydown: event => this.key(event)});
    this.said = h("p", {class: "said", "aria-live": "polite", hidden: true});
    this.numbers = h("div", {hidden: true});
    this.title = h("h3", {}, options.swatch ? h("span", {class: "swatch", colour: options.swatch}) : null, options.title,
      options.about ? h("small", {}, options.about) : null);
    this.element = h("figure", {class: "card"}, h("header", {}, this.title, options.tools || [], this.logButton, this.tableButton),
      this.legend, this.plot, this.said, this.numbers);
    this.logButton?.setAttribute("aria-pressed", this.isLog);
    this.size = new ResizeObserver(() => {
      const width = this.plot.clientWidth;
      if (this.drawn && width && width !== this.drawn.width) this.drawn.setSize({width, height: HEIGHT});
    });
    this.size.observe(this.plot);
  }

  // series: label, colour (name of a CSS variable), x, y, smooth (the moving average of y), dots, line (through the
  // dots), dashed, width
  update(series) {
    this.given = series;
    this.axis = this.options.view?.axis ?? AXES.rank;
    this.element.dataset.axis = this.axis.name;
    const shown = series.filter(each => !this.hidden.has(each.label));
    this.series = shown;
    const lines = shown.flatMap(each => each.smooth ? [{...each, isFaint: true}, {...each, y: each.smooth}] : [each]);
    const signature = JSON.stringify([this.isLog, this.axis.name, this.options.kind.name, lines.map(each => [each.label, each.colour, each.dots, each.dashed]), series.length]);
    const data = this.data(lines);
    if (!shown.some(each => each.x.length)) {
      this.drop();
      this.plot.replaceChildren(h("p", {class: "empty"}, series.length ? "all series are hidden" : this.options.empty || "no data yet"));
      this.entries(series);
      return;
    }
    if (this.drawn && signature === this.signature) {
      this.drawn.setData(data, false);
      this.rescale();
    } else {
      this.signature = signature;
      this.draw(data, lines);
      this.entries(series);
    }
    this.showValues();
    if (!this.numbers.hidden) this.fillTable();
  }

  data(shown) {
    if (!shown.length) return [[]];
    let joined = uPlot.join(shown.map(each => [each.x, each.y]));
    if (this.isLog) joined = [joined[0], ...joined.slice(1).map(column => column.map(value => value > 0 ? value : value === undefined ? undefined : null))];
    if (!this.options.stacked) return joined;
    const sums = new Array(joined[0].length).fill(0);
    return [joined[0], ...joined.slice(1).map(column => column.map((value, index) => sums[index] += value || 0))];
  }

  range() {
    const found = this.options.view?.range;
    if (found) return found;
    let low = Infinity, high = -Infinity;
    for (const {x} of this.series) if (x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
    if (this.axis === AXES.rank) return [low - 0.6, high + 0.6];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  rescale() {
    const [min, max] = this.range();
    this.drawn.setScale("x", {min, max});
  }

  drop() {
    if (!this.drawn) return;
    this.options.view?.sync.unsub(this.drawn);
    this.drawn.destroy();
    this.drawn = null;
    this.signature = "";
  }

  draw(data, shown) {
    this.drop();
    this.cursorAt = null;
    this.plot.replaceChildren();
    const {axis} = this, {view, stacked, bars, kind} = this.options;
    const ink = () => colour("quiet"), titled = label => ({stroke: ink, font: FONT, label, labelFont: FONT, labelSize: 17, labelGap: 2});
    const series = shown.map((each, index) => ({
      label: each.label,
      scale: "y",
      stroke: () => colour(each.colour) + (each.isFaint ? FAINT : ""),
      width: each.dots && !each.line ? 0 : each.width || 1.5,
      dash: each.dashed ? [6, 4] : undefined,
      fill: stacked || bars ? () => colour(each.colour) + (stacked ? "" : "b8") : undefined,
      paths: bars && !each.dots ? uPlot.paths.bars({size: [0.72, 60], align: 0}) : each.dots && !each.line ? () => null : undefined,
      points: {show: each.isFaint ? false : Boolean(each.dots) || undefined, size: each.dots || 5, fill: () => colour(each.colour), stroke: () => colour(each.colour)},
      order: index,
    }));
    // Stacked areas are drawn from the top down, so that each covers the lower part of the area above it.
    const places = shown.map((_, index) => stacked ? shown.length - 1 - index : index);
    this.order = places;
    const drawn = new uPlot({
      width: this.plot.clientWidth || 400,
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      legend: {show: false},
      scales: {
        x: {time: false, range: () => this.range()},
        y: {distr: this.isLog ? 3 : 1, range: this.isLog ? undefined : (u, low, high) => this.span(low, high)},
      },
      cursor: {
        sync: view ? {key: view.sync.key, scales: ["x", null]} : undefined,
        drag: {x: Boolean(view), y: false, setScale: false},
        points: {size: 6},
        y: false,
        bind: {dblclick: () => () => { view?.set(null); return null; }},
      },
      select: {show: Boolean(view)},
      axes: [
        {...titled(axis.title), grid: {show: false}, ticks: {stroke: () => colour("line"), width: 1, size: 4}, size: 26, space: 70,
          incrs: axis.increments, values: (u, ticks, index, space, distance) => axis.labels(ticks, distance)},
        {...titled(this.options.y), grid: {stroke: () => colour("grid"), width: 1}, ticks: {show: false}, size: 56,
          ...(this.isLog ? {} : {incrs: kind.increments}),
          values: (u, ticks, index, space, distance) => this.isLog ? ticks.map(tick => tick === null ? "" : kind.power(tick)) : kind.labels(ticks, distance)},
      ],
      series: [{label: axis.name}, ...places.map(index => series[index])],
      hooks: {
        setSelect: [u => {
          if (u.select.width > 4) {
            const ends = [u.select.left, u.select.left + u.select.width].map(left => u.posToVal(left, "x"));
            if (ends[1] - ends[0] >= axis.least / 4) view.set([Math.max(0, ends[0]), ends[1]]);
          }
          u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
        }],
        setCursor: [u => {
          const left = u.cursor.left;
          const at = left >= 0 ? u.posToVal(left, "x") : null;
          this.cursorAt = at === null || axis === AXES.time ? at : Math.round(at);
          this.showValues();
        }],
        draw: [u => this.options.marks?.(u, this.options.labels)],
      },
    }, [data[0], ...places.map(index => data[index + 1])], this.plot);
    const set = drawn.setData.bind(drawn);
    drawn.setData = (given, rescales) => set([given[0], ...places.map(index => given[index + 1])], rescales);
    this.drawn = drawn;
  }

  span(low, high) {
    if (low === null || high === null || low === undefined) return [0, 1];
    if (this.options.fromZero || this.options.stacked || this.options.bars) return [0, high > 0 ? high * 1.08 : 1];
    const margin = (high - low) * 0.07 || Math.abs(high) * 0.05 || 1;
    return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
  }

  // -- legend: values at the cursor, or the last ones

  entries(series) {
    this.at = h("li", {class: "at"});
    this.values = new Map();
    const items = series.map(each => {
      const value = h("b");
      this.values.set(each.label, value);
      const swatch = h("span", {class: "swatch " + (this.options.stacked || this.options.bars && !each.dots ? "" : each.dots ? (each.line ? "joined" : "dots") : each.dashed ? "line dashed" : "line"), colour: `var(--${each.colour})`});
      return h("li", {}, h("button", {type: "button", "aria-pressed": !this.hidden.has(each.label), title: `show or hide ${each.label}`, onclick: () => this.toggle(each.label)},
        swatch, h("span", {}, each.label)), value);
    });
    this.legend.replaceChildren(this.at, ...items);
  }

  toggle(label) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    this.signature = "";
    this.update(this.given);
    [...this.legend.querySelectorAll("button")].find(button => button.textContent === label)?.focus();
  }

  showValues() {
    if (!this.values) return;
    const at = this.cursorAt, ofRanks = this.axis === AXES.rank, {format} = this.options.kind;
    this.at.textContent = at === null ? (ofRanks ? "" : "last values") : this.axis.words(at);
    for (const {label, x, y, smooth} of this.series) {
      const index = at === null ? x.length - 1 : nearest(x, at), value = this.values.get(label);
      const isEmpty = !x.length || ofRanks && (at === null || x[index] !== at);
      if (value) value.textContent = isEmpty ? "" : format(y[index]) + (smooth ? `, smoothed ${format(smooth[index])}` : "");
    }
  }

  words() {
    const at = this.cursorAt;
    if (at === null) return "";
    return `${this.axis.words(at)}: ` + this.series.filter(each => each.x.length).map(({label, x, y}) => `${label} ${this.options.kind.format(y[nearest(x, at)])}`).join(", ");
  }

  // -- keys

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.plot) return;
    const {view} = this.options, moves = {ArrowLeft: -1, ArrowRight: 1};
    if (event.key === "t") this.toggleTable();
    else if (event.key === "l" && this.logButton) this.toggleLog();
    else if (!this.drawn) return;
    else if (moves[event.key] && event.shiftKey && view) this.pan(moves[event.key] * 0.25);
    else if (moves[event.key]) this.step(moves[event.key]);
    else if (event.key === "Home" || event.key === "End") this.to(event.key === "Home" ? 0 : Infinity);
    else if ((event.key === "+" || event.key === "=") && view) this.zoom(0.5);
    else if ((event.key === "-" || event.key === "−") && view) this.zoom(2);
    else if (event.key === "Escape") this.drawn.setCursor({left: -10, top: -10}, true, true);
    else return;
    event.preventDefault();
    event.stopPropagation();
    this.said.hidden = false;
    this.said.textContent = this.words();
  }

  points() {
    const [low, high] = this.range();
    return (this.drawn.data[0] || []).filter(each => each >= low && each <= high);
  }

  step(by) {
    const points = this.points();
    if (!points.length) return;
    if (this.cursorAt === null) return this.to(by > 0 ? 0 : Infinity);
    this.to(nearest(points, this.cursorAt) + by);
  }

  to(index) {
    const points = this.points();
    const at = points[Math.max(0, Math.min(points.length - 1, index))];
    this.drawn.setCursor({left: this.drawn.valToPos(at, "x"), top: this.drawn.over.clientHeight / 2}, true, true);
    this.cursorAt = at;
    this.showValues();
  }

  zoom(factor) {
    const [low, high] = this.range(), middle = this.cursorAt ?? (low + high) / 2;
    const wide = Math.max(this.axis.least, (high - low) * factor);
    const start = Math.max(0, middle - wide * (middle - low) / (high - low));
    this.options.view.set([start, start + wide]);
  }

  pan(by) {
    const [low, high] = this.range(), move = Math.max(-low, (high - low) * by);
    this.options.view.set([low + move, high + move]);
  }

  toggleLog() {
    this.isLog = !this.isLog;
    this.logButton.setAttribute("aria-pressed", this.isLog);
    this.update(this.given);
  }

  // -- table

  toggleTable() {
    this.numbers.hidden = !this.numbers.hidden;
    this.tableButton.setAttribute("aria-pressed", !this.numbers.hidden);
    if (!this.numbers.hidden) this.fillTable();
    else this.numbers.replaceChildren();
  }

  fillTable() {
    const [low, high] = this.series.length ? this.range() : [0, 0];
    const rows = new Map();
    this.series.forEach(({x, y}, column) => x.forEach((at, index) => {
      if (at < low || at > high) return;
      if (!rows.has(at)) rows.set(at, new Array(this.series.length).fill(""));
      rows.get(at)[column] = this.options.kind.format(y[index]);
    }));
    const all = [...rows].sort((a, b) => a[0] - b[0]), every = Math.ceil(all.length / TABLE_ROWS);
    const kept = all.filter((_, index) => index % every === 0 || index === all.length - 1);
    const caption = `${this.options.title}: ${kept.length === all.length ? "all drawn points" : `${kept.length} of ${all.length} drawn points`}`;
    this.numbers.replaceChildren(table(caption, [this.axis.name, ...this.series.map(each => each.label)], kept.map(([at, values]) => [this.axis.format(at), ...values])));
  }

  redraw() { this.drawn?.redraw(false, true); }
}
