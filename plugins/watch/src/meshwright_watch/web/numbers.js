// Number formats, and the ticks of axes: round numbers in one unit, with as many decimals as their distance needs.

export const count = value => value.toLocaleString("en-US");
export const short = value => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [unit, one] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]])
    if (size >= one * 0.9995) return trim((value / one).toPrecision(3)) + unit;
  return trim(value.toPrecision(3));
};
const trim = text => text.includes("e") || !text.includes(".") ? text : text.replace(/\.?0+$/, "");
export const exact = value => value === null || value === undefined ? "not finite" : String(value);
export const plain = value => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(3);
  return size < 100 ? value.toFixed(size < 10 ? 4 : 3) : count(Math.round(value * 10) / 10);
};
export const bytes = value => {
  if (value === null || value === undefined) return "–";
  for (const [unit, one] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (Math.abs(value) >= one) return (value / one).toFixed(Math.abs(value) < 100 * one && value % one ? 2 : 0) + " " + unit;
  return value + " B";
};
export const seconds = value => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size >= 86400) return trim((value / 86400).toFixed(1)) + " d";
  if (size >= 3600) return trim((value / 3600).toFixed(1)) + " h";
  if (size >= 120) return trim((value / 60).toFixed(1)) + " min";
  for (const [unit, one] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
    if (size >= one * 0.9995) return trim((value / one).toPrecision(3)) + " " + unit;
  return trim((value / 1e-9).toPrecision(3)) + " ns";
};
export const percent = value => value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %";

// -- ticks

const decades = (low, high) => Array.from({length: high - low + 1}, (_, index) => low + index).flatMap(power => [1, 2, 5].map(each => Number(`${each}e${power}`)));
// Units of labels, the largest first: name, size, and the largest tick and the distance of ticks from which it is used.
const PLAIN = [["T", 1e12, 1e12, 1e11], ["B", 1e9, 1e9, 1e8], ["M", 1e6, 1e6, 1e5], ["k", 1e3, 1e4, 100], ["", 1, 0, 0]];
const SECONDS = [[" d", 86400, 86400, 43200], [" h", 3600, 3600, 1800], [" min", 60, 120, 60], [" s", 1, 0.5, 0.1], [" ms", 1e-3, 5e-4, 1e-4], [" µs", 1e-6, 0, 0]];
const BYTES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].map(([name, size]) => [" " + name, size, size, size / 2]).concat([[" B", 1, 0, 0]]);

const labels = (units, ticks, distance) => {
  const largest = Math.max(...ticks.map(Math.abs));
  const [name, size] = units.find(([, , least, gap]) => largest >= least && distance >= gap);
  const digits = Math.max(0, Math.ceil(-Math.log10(distance / size) - 1e-6));
  if (digits > 4) return ticks.map(tick => tick === 0 ? "0" : Number(tick.toPrecision(8)).toExponential() + name);
  return ticks.map(tick => tick === 0 ? "0" : (tick / size).toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits}) + name);
};
const power = value => value >= 1e-3 && value < 1e5 ? short(value) : Number(value.toPrecision(3)).toExponential();

// What a chart shows: format of a value, tick labels, distances of ticks, and the label of a tick of a logarithmic scale.
const kind = (name, format, units, increments, power = format) =>
  ({name, format, increments, power, labels: (ticks, distance) => labels(units, ticks, distance)});
const NUMBERS = decades(-16, 15), TIMES = [...decades(-9, 0), 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, ...decades(0, 4).map(days => days * 86400)];
export const KINDS = {
  plain: kind("plain", plain, PLAIN, NUMBERS, power),
  short: kind("short", short, PLAIN, NUMBERS, power),
  seconds: kind("seconds", seconds, SECONDS, TIMES),
  bytes: kind("bytes", bytes, BYTES, Array.from({length: 52}, (_, index) => 2 ** index)),
  percent: kind("percent", percent, [[" %", 0.01, 0, 0]], decades(-6, 2)),
};

// X axes of charts: title, shortest range to zoom into, text of a position, and where the cursor is in words.
const axis = (name, title, least, format, words, {labels, increments}) => ({name, title, least, format, words, labels, increments});
const WHOLE = {...KINDS.plain, increments: decades(0, 15)};
const whole = value => count(Math.round(value));
export const AXES = {
  step: axis("step", "step", 4, whole, step => `step ${whole(step)}`, WHOLE),
  time: axis("time", "time since the start", 1e-3, seconds, seconds, KINDS.seconds),
  tokens: axis("tokens", "tokens", 4, whole, tokens => `${short(tokens)} tokens`, WHOLE),
  rank: axis("rank", "rank", 4, whole, rank => `rank ${whole(rank)}`, WHOLE),
};
// At most so many round numbers from 0 to an end.
export const roundNumbers = (kind, end, most) => {
  const distance = kind.increments.find(each => end / each <= most) ?? end;
  const ticks = Array.from({length: Math.floor(end / distance) + 1}, (_, index) => index * distance);
  return ticks.map((tick, index) => [tick, kind.labels(ticks, distance)[index]]);
};

// Index of the number nearest to a value, in ascending numbers.
export const nearest = (numbers, value) => {
  let low = 0, high = numbers.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= value) low = middle; else high = middle;
  }
  return numbers.length && Math.abs(numbers[high] - value) < Math.abs(numbers[low] - value) ? high : low;
};
