"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const LEFT = 150, RIGHT = 14;

// -- numbers and colours

const sums = changes => {
  const found = new Float64Array(changes.length);
  let total = 0;
  for (let i = 0; i < changes.length; i++) found[i] = total += changes[i];
  return found;
};
const count = value => value.toLocaleString("en-US");
const size = bytes => {
  for (const [unit, one] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (bytes >= one) return (bytes / one).toFixed(bytes < 100 * one ? 2 : 0) + " " + unit;
  return bytes + " B";
};
const time = ns => {
  for (const [unit, one] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]])
    if (ns >= one) return (ns / one).toPrecision(ns < 1000 * one ? 3 : 4).replace(/\.?0+$/, "") + " " + unit;
  return ns + " ns";
};
const ticks = (low, high, wanted) => {
  const rough = (high - low) / wanted, scale = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(each => each * scale).find(each => each >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12); i++) found.push(i * step);
  return found;
};
let known = {};
const colours = name => known[name] ??= getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

// -- one view of time for both plots

const view = {from: 0, to: data.end};
const charts = [];
const show = (from, to) => {
  const width = Math.min(data.end, Math.max(data.end / 20000, to - from));
  from = Math.min(Math.max(0, from), data.end - width);
  view.from = from;
  view.to = from + width;
  drawAll();
};
const zoom = (factor, at) => show(at - (at - view.from) * factor, at + (view.to - at) * factor);
const drawAll = () => charts.forEach(chart => chart.draw());

class Chart {
  constructor(name) {
    this.canvas = byId(name + "-chart");
    this.readout = byId(name + "-read");
    this.hint = this.readout.textContent;
    this.cursor = null;
    this.drag = null;
    const on = (what, act) => this.canvas.addEventListener(what, act);
    on("pointerdown", event => {
      if (event.button) return;
      this.drag = {from: this.x(event), to: this.x(event)};
      this.canvas.setPointerCapture(event.pointerId);
    });
    on("pointermove", event => {
      if (this.drag) this.drag.to = this.x(event);
      this.point(this.x(event), event.offsetY);
      this.announce("off");
    });
    on("pointerup", () => this.release());
    on("pointercancel", () => { this.drag = null; this.draw(); });
    on("pointerleave", () => { if (!this.drag && document.activeElement !== this.canvas) this.clear(); });
    on("dblclick", event => zoom(0.4, this.timeAt(this.x(event))));
    on("wheel", event => {
      if (event.ctrlKey || event.metaKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, this.timeAt(this.x(event)));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / this.width);
      else return;
      event.preventDefault();
    });
    on("keydown", event => this.key(event));
    on("focus", () => { if (!this.cursor) { this.begin(); this.announce("polite"); } });
    document.querySelector(`.tools[data-of="${name}"]`).addEventListener("click", event => {
      const act = event.target.dataset.do;
      if (act) this.act(act);
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    charts.unshift(this);
  }
  get width() { return this.canvas.clientWidth - LEFT - RIGHT; }
  get height() { return this.canvas.clientHeight; }
  x(event) { return Math.min(LEFT + this.width, Math.max(LEFT, event.offsetX)); }
  xOf(ns) { return LEFT + (ns - view.from) / (view.to - view.from) * this.width; }
  timeAt(x) { return view.from + (x - LEFT) / this.width * (view.to - view.from); }
  pan(part) { const by = part * (view.to - view.from); show(view.from + by, view.to + by); }
  release() {
    const drag = this.drag;
    this.drag = null;
    if (drag && Math.abs(drag.to - drag.from) > 5) {
      const ends = [this.timeAt(drag.from), this.timeAt(drag.to)].sort((a, b) => a - b);
      show(...ends);
    } else this.draw();
  }
  act(what) {
    const middle = this.cursor ? this.cursorTime() : (view.from + view.to) / 2;
    if (what === "in") zoom(0.5, middle);
    if (what === "out") zoom(2, middle);
    if (what === "left") this.pan(-0.3);
    if (what === "right") this.pan(0.3);
    if (what === "all") show(0, data.end);
    if (what === "peak") this.toPeak();
  }
  key(event) {
    if (event.altKey || event.metaKey || event.ctrlKey) return;
    const acts = {"+": "in", "=": "in", "-": "out", "0": "all", "Home": "all", "p": "peak"};
    const moves = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
    if (acts[event.key]) this.act(acts[event.key]);
    else if (moves[event.key] && event.shiftKey) this.pan(moves[event.key][0] * 0.2);
    else if (moves[event.key]) {
      if (!this.cursor) this.begin();
      else this.move(...moves[event.key]);
      const at = this.cursorTime();
      if (at < view.from || at > view.to) show(at - (view.to - view.from) / 2, at + (view.to - view.from) / 2);
    } else if (event.key === "Escape") this.clear();
    else return;
    event.preventDefault();
    this.draw();
    this.announce("polite");
  }
  clear() { this.cursor = null; this.readout.textContent = this.hint; this.draw(); }
  announce(how) { this.readout.setAttribute("aria-live", how); this.readout.textContent = this.words() || this.hint; this.draw(); }
  draw() {
    const ratio = window.devicePixelRatio || 1, {clientWidth, clientHeight} = this.canvas;
    if (!clientWidth) return;
    if (this.canvas.width !== Math.round(clientWidth * ratio)) this.canvas.width = Math.round(clientWidth * ratio);
    if (this.canvas.height !== Math.round(clientHeight * ratio)) this.canvas.height = Math.round(clientHeight * ratio);
    const pen = this.pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, clientWidth, clientHeight);
    pen.font = "12px " + getComputedStyle(document.body).fontFamily;
    pen.textBaseline = "middle";
    this.times();
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.width, this.height);
    pen.clip();
    this.paint();
    pen.restore();
    this.labels();
    if (this.drag) {
      pen.globalAlpha = 0.2;
      pen.fillStyle = colours("focus");
      pen.fillRect(this.drag.from, 0, this.drag.to - this.drag.from, this.height);
      pen.globalAlpha = 1;
    }
  }
  times() {
    const pen = this.pen, bottom = this.height - 22;
    const [unit, one] = view.to - view.from > 2e9 ? ["s", 1e9] : view.to - view.from > 2e6 ? ["ms", 1e6] : ["µs", 1e3];
    const marks = ticks(view.from / one, view.to / one, Math.max(2, this.width / 110));
    for (const at of marks) {
      const x = this.xOf(at * one);
      this.rule(x, 0, x, bottom, "line");
      const words = `${+at.toFixed(4)} ${unit}`;
      const half = pen.measureText(words).width / 2;
      this.text(words, Math.min(x, this.canvas.clientWidth - half - 4), bottom + 12, "quiet", "center");
    }
    this.rule(LEFT, bottom, LEFT + this.width, bottom, "quiet");
  }
  rule(x1, y1, x2, y2, colour, dash = [], wide = 1) {
    const pen = this.pen;
    pen.beginPath();
    pen.setLineDash(dash);
    pen.lineWidth = wide;
    pen.strokeStyle = colours(colour);
    pen.moveTo(x1, y1);
    pen.lineTo(x2, y2);
    pen.stroke();
    pen.setLineDash([]);
  }
  text(words, x, y, colour, align = "left", halo = false) {
    const pen = this.pen;
    pen.textAlign = align;
    if (halo) {
      pen.lineWidth = 4;
      pen.lineJoin = "round";
      pen.strokeStyle = colours("ground");
      pen.strokeText(words, x, y);
    }
    pen.fillStyle = colours(colour);
    pen.fillText(words, x, y);
  }
}

// -- memory over the step

class MemoryChart extends Chart {
  constructor() {
    super("memory");
    this.all = data.memory.map(each => {
      const owners = Object.entries(each.owners).map(([owner, changes]) => [owner, sums(changes).map(v => v * data.unit)]);
      const time = sums(each.time);
      return {...each, time, owners, total: time.map((_, i) => owners.reduce((sum, [, sizes]) => sum + sizes[i], 0))};
    });
    this.chosen = this.all[0];
    const choice = byId("memory-rank");
    if (choice) choice.addEventListener("change", () => { this.chosen = this.all[choice.value]; this.cursor = null; this.legend(); this.draw(); });
    this.legend();
  }
  legend() {
    const {owners, peak, reserved} = this.chosen;
    for (const each of document.querySelectorAll("[data-owner]")) {
      const own = owners.find(([owner]) => owner === each.dataset.owner);
      each.textContent = own ? size(own[1][peak]) : "none";
    }
    document.querySelector("[data-reserved]").textContent = size(reserved);
    document.querySelector("[data-limit]").textContent = size(data.limit);
  }
  get top() { return 34; }
  get bottom() { return this.height - 22; }
  get most() {
    const own = Math.max(this.chosen.reserved, this.chosen.total[this.chosen.peak]);
    return data.limit <= 2.2 * own ? Math.max(own, data.limit) * 1.07 : own * 1.12;
  }
  y(bytes) { return this.bottom - bytes / this.most * (this.bottom - this.top); }
  begin() { this.cursor = {i: this.chosen.peak}; }
  cursorTime() { return this.chosen.time[this.cursor.i]; }
  // Memory of a moment is held until the next.
  indexAt(ns) {
    const {time} = this.chosen;
    let low = 0, high = time.length - 1;
    while (low < high) { const half = low + high + 1 >> 1; if (time[half] > ns) high = half - 1; else low = half; }
    return low;
  }
  beginOf(i) { return this.xOf(i ? this.chosen.time[i] : 0); }
  endOf(i) { return this.xOf(i + 1 < this.chosen.time.length ? this.chosen.time[i + 1] : data.end); }
  point(x) {
    const near = Math.abs(x - this.beginOf(this.chosen.peak)) < 4;
    this.cursor = {i: near ? this.chosen.peak : this.indexAt(this.timeAt(x))};
  }
  move(dx) {
    const last = this.chosen.time.length - 1, here = this.xOf(this.cursorTime());
    let i = this.cursor.i;
    do i += dx; while (i > 0 && i < last && Math.abs(this.xOf(this.chosen.time[i]) - here) < 2);
    this.cursor.i = Math.max(0, Math.min(last, i));
  }
  toPeak() {
    const at = this.chosen.time[this.chosen.peak], width = Math.min(view.to - view.from, data.end / 10);
    this.cursor = {i: this.chosen.peak};
    show(at - width / 2, at + width / 2);
    this.announce("polite");
  }
  words() {
    if (!this.cursor) return "";
    const {i} = this.cursor, {owners, total, time: times, names, phases, peak, rank} = this.chosen;
    const parts = owners.filter(([, sizes]) => sizes[i]).map(([owner, sizes]) => `${owner} ${size(sizes[i])}`).reverse();
    const at = i === peak ? "peak, " : "";
    return `${at}rank ${rank}, ${time(times[i])}, ${data.phases[phases[i]]}, ${data.names[names[i]]}: ${size(total[i])} = ${parts.join(" + ")}`;
  }
  sizes() {
    const [unit, one] = this.most > 2 * 2 ** 30 ? ["GiB", 2 ** 30] : this.most > 2 * 2 ** 20 ? ["MiB", 2 ** 20] : ["KiB", 2 ** 10];
    return ticks(0, this.most / one, 6).map(at => [at * one, `${+at.toFixed(3)} ${unit}`]);
  }
  paint() {
    const {time, owners, total, peak, reserved, rank} = this.chosen, pen = this.pen, n = time.length;
    for (const [bytes] of this.sizes()) this.rule(LEFT, this.y(bytes), LEFT + this.width, this.y(bytes), "line");
    const first = this.indexAt(view.from), last = this.indexAt(view.to);
    const base = new Float64Array(n);
    for (const [owner, sizes] of owners) {
      pen.beginPath();
      const outline = (from, to, step, value) => {
        for (let i = from; i !== to; i += step) {
          const begin = this.beginOf(i), end = this.endOf(i), y = this.y(value(i));
          if (step > 0) { pen.lineTo(begin, y); pen.lineTo(end, y); } else { pen.lineTo(end, y); pen.lineTo(begin, y); }
        }
      };
      outline(first, last + 1, 1, i => base[i] + sizes[i]);
      outline(last, first - 1, -1, i => base[i]);
      pen.closePath();
      pen.fillStyle = pen.strokeStyle = colours("owner-" + owner);
      pen.fill();
      pen.lineWidth = 0.6;
      pen.stroke();
      for (let i = first; i <= last; i++) base[i] += sizes[i];
    }
    this.phases(rank);
    this.rule(LEFT, this.y(reserved), LEFT + this.width, this.y(reserved), "text", [7, 4], 1.5);
    if (data.limit <= this.most) this.rule(LEFT, this.y(data.limit), LEFT + this.width, this.y(data.limit), "limit", [7, 4], 2);
    const x = this.beginOf(peak), y = this.y(total[peak]);
    pen.beginPath();
    pen.arc(x, y, 4.5, 0, 7);
    pen.fillStyle = colours("ground");
    pen.strokeStyle = colours("text");
    pen.lineWidth = 2;
    pen.fill();
    pen.stroke();
    if (this.cursor) this.rule(this.xOf(this.cursorTime()), this.top - 4, this.xOf(this.cursorTime()), this.bottom, "text");
  }
  // The computing stream's bars, and the names of phases where they fit.
  phases(rank) {
    const pen = this.pen, {bars} = timeline.lanes.find(lane => lane.rank === rank && lane.stream === "compute");
    let run = null;
    const name = () => {
      if (!run) return;
      const from = Math.max(LEFT, this.xOf(run.start)), to = Math.min(LEFT + this.width, this.xOf(run.end));
      const words = data.phases[run.phase];
      if (to - from > pen.measureText(words).width + 12) this.text(words, (from + to) / 2, 15.5, "ground", "center");
    };
    for (const bar of bars) {
      const x = this.xOf(bar.start);
      pen.fillStyle = colours("phase-" + data.phases[bar.phase]);
      pen.fillRect(x, 8, Math.max(0.7, this.xOf(bar.end) - x), 14);
    }
    for (const bar of bars) {
      if (run && run.phase === bar.phase && this.xOf(bar.start) - this.xOf(run.end) < 2) run.end = Math.max(run.end, bar.end);
      else { name(); run = {...bar}; }
    }
    name();
  }
  labels() {
    const {time, total, peak, names, reserved} = this.chosen, pen = this.pen;
    for (const [bytes, words] of this.sizes()) this.text(words, LEFT - 8, this.y(bytes), "quiet", "right");
    this.text("phase", LEFT - 8, 15, "quiet", "right");
    const right = LEFT + this.width - 6;
    const reservedY = this.y(reserved), limitY = this.y(data.limit), isSeen = data.limit <= this.most;
    // If two lines are close, label the upper one above it and the lower one below it.
    const isClose = isSeen && Math.abs(limitY - reservedY) < 22, isUsableBelow = isClose && limitY > reservedY;
    this.text(`reserved ${size(reserved)}`, right, reservedY + (isClose && !isUsableBelow ? 10 : -9), "text", "right", true);
    if (isSeen) this.text(`usable ${size(data.limit)}`, right, limitY + (isUsableBelow ? 10 : -9), "limit", "right", true);
    else this.text(`usable ${size(data.limit)}: above the range shown`, right, this.top + 2, "limit", "right", true);
    const x = this.beginOf(peak);
    if (x < LEFT - 1 || x > LEFT + this.width + 1) return;
    const short = `peak ${size(total[peak])}`, long = `${short}, ${data.names[names[peak]]}`;
    // On a narrow page, the name of the operator is left out.
    const words = pen.measureText(long).width < this.width ? long : short, half = pen.measureText(words).width / 2;
    let y = this.y(total[peak]) - 14;
    // Above the line of reserved memory, where it would overlap it.
    if (Math.abs(y - reservedY) < 9) y = reservedY - 10;
    const most = y < reservedY && reservedY - y < 16 ? right - 140 : right;
    this.text(words, Math.max(LEFT + half + 4, Math.min(x, most - half)), y, "text", "center", true);
  }
}

// -- the timeline

class TimelineChart extends Chart {
  constructor() {
    super("timeline");
    this.every = data.lanes.map(lane => {
      const bars = [];
      let start = 0;
      for (let i = 0; i < lane.bars.length; i += 6) {
        const [gap, length, busy, name, phase, number] = lane.bars.slice(i, i + 6);
        start += gap;
        bars.push({start, end: start + length, busy, name, phase, number});
      }
      return {...lane, bars, busy: bars.reduce((sum, bar) => sum + bar.busy, 0)};
    });
    byId("timeline-all").addEventListener("change", () => { this.cursor = null; this.place(); this.draw(); });
    this.place();
  }
  place() {
    const isAll = byId("timeline-all").checked;
    let y = 12, rank = null;
    this.heads = [];
    this.lanes = this.every.filter(lane => isAll || lane.stream === "compute" || lane.busy > data.end / 1000);
    for (const lane of this.lanes) {
      if (lane.rank !== rank) {
        rank = lane.rank;
        this.heads.push({rank, y: y + 8});
        y += 22;
      }
      lane.y = y;
      y += 19;
    }
    this.canvas.style.height = y + 30 + "px";
  }
  begin() { this.cursor = {lane: 0, bar: this.firstSeen(this.lanes[0])}; }
  firstSeen(lane) { return Math.max(0, lane.bars.findIndex(bar => bar.end >= view.from)); }
  bar() { return this.lanes[this.cursor.lane].bars[this.cursor.bar]; }
  cursorTime() { const bar = this.bar(); return bar ? (bar.start + bar.end) / 2 : view.from; }
  point(x, y) {
    const lane = this.lanes.findIndex(each => y >= each.y - 2 && y < each.y + 17);
    if (lane < 0) { this.cursor = null; return; }
    const at = this.timeAt(x), near = (view.to - view.from) / this.width * 2;
    const bar = this.lanes[lane].bars.findIndex(each => at >= each.start - near && at <= each.end + near);
    this.cursor = {lane, bar, at};
  }
  move(dx, dy) {
    const at = this.cursorTime();
    if (dy) {
      const lane = Math.max(0, Math.min(this.lanes.length - 1, this.cursor.lane + dy));
      const bar = this.lanes[lane].bars.findIndex(each => each.end >= at);
      this.cursor = {lane, bar: bar < 0 ? this.lanes[lane].bars.length - 1 : bar};
    } else {
      const bars = this.lanes[this.cursor.lane].bars;
      this.cursor = {lane: this.cursor.lane, bar: Math.max(0, Math.min(bars.length - 1, this.cursor.bar + dx))};
    }
  }
  words() {
    if (!this.cursor) return "";
    const lane = this.lanes[this.cursor.lane], bar = this.bar();
    const name = `rank ${lane.rank}, ${lane.stream}` + (lane.link ? ` (${lane.link === "intra_node" ? "within a node" : "between nodes"})` : "");
    if (!bar) return `${name}: idle`;
    const many = bar.number > 1 ? `${bar.number} operators, the longest ${data.names[bar.name]}, busy for ${time(bar.busy)}` : data.names[bar.name];
    return `${name}, ${data.phases[bar.phase]}: ${many}; from ${time(bar.start)}, for ${time(bar.end - bar.start)}`;
  }
  paint() {
    const pen = this.pen;
    this.lanes.forEach((lane, index) => {
      if (lane.stream === "compute") {
        pen.fillStyle = colours("panel");
        pen.fillRect(LEFT, lane.y, this.width, 15);
      }
      for (const bar of lane.bars) {
        if (bar.end < view.from || bar.start > view.to) continue;
        const x = this.xOf(bar.start), wide = Math.max(0.7, this.xOf(bar.end) - x);
        pen.globalAlpha = bar.number > 1 ? Math.max(0.25, bar.busy / (bar.end - bar.start || 1)) : 1;
        pen.fillStyle = colours(lane.link ? "link-" + lane.link : "phase-" + data.phases[bar.phase]);
        pen.fillRect(x, lane.y, wide > 6 ? wide - 0.7 : wide, 15);
      }
      pen.globalAlpha = 1;
      if (this.cursor && this.cursor.lane === index && this.bar()) {
        const bar = this.bar(), x = this.xOf(bar.start);
        pen.strokeStyle = colours("text");
        pen.lineWidth = 2;
        pen.strokeRect(x - 1, lane.y - 1, Math.max(2, this.xOf(bar.end) - x) + 2, 17);
      }
    });
  }
  labels() {
    for (const {rank, y} of this.heads) {
      this.pen.font = "600 " + this.pen.font;
      this.text(`rank ${rank}`, 8, y + 4, "text");
      this.pen.font = this.pen.font.replace("600 ", "");
    }
    this.text("busy", LEFT - 8, this.heads[0].y + 4, "quiet", "right");
    for (const lane of this.lanes) {
      this.text(lane.stream, 20, lane.y + 8, "text");
      this.text((lane.busy / data.end * 100).toFixed(1) + " %", LEFT - 8, lane.y + 8, "quiet", "right");
    }
  }
}

// -- groups of a rank

const describeRank = () => {
  const rank = Math.floor(Number(byId("rank").value)), {node, world, axes} = data.mesh;
  if (!(rank >= 0 && rank < world)) { byId("rank-read").textContent = `Ranks are numbered 0 to ${count(world - 1)}.`; return; }
  const parts = [`Rank ${rank} is on node ${Math.floor(rank / node)}`], seen = new Set();
  for (const mesh of axes) {
    let stride = 1;
    for (const [axis, degree] of [...mesh].reverse()) {
      const index = Math.floor(rank / stride) % degree, first = rank - index * stride, last = first + (degree - 1) * stride;
      if (degree > 1 && !seen.has(axis)) {
        const nodes = new Set(Array.from({length: degree}, (_, i) => Math.floor((first + i * stride) / node))).size;
        const ranks = Array.from({length: Math.min(degree, 3)}, (_, i) => first + i * stride).join(", ") + (degree > 3 ? (degree > 4 ? ", … " : ", ") + last : "");
        parts.push(`${axis} ${index} of ${count(degree)}, with ranks ${ranks}, ${nodes === 1 ? "within the node" : "on " + count(nodes) + " nodes"}`);
      }
      seen.add(axis);
      stride *= degree;
    }
  }
  byId("rank-read").textContent = parts.join("; ") + ".";
};

const timeline = new TimelineChart();
const memory = new MemoryChart();
byId("rank").addEventListener("input", describeRank);
describeRank();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { known = {}; drawAll(); });
drawAll();
})();
