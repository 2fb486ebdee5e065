// What the page holds, and how a number is written: as `number` of the tables does.
const DATA = JSON.parse(document.getElementById("page-data").textContent);
const DASH = "–";

function decoded(value) {
  if (value === null || value === undefined) return NaN;
  if (value === "inf") return Infinity;
  return value === "-inf" ? -Infinity : value;
}

const METRICS = DATA.metrics;
const LINES = new Map(DATA.lines.map((line) => [line.number, line]));
const SCORES = new Map(DATA.scores.map(([line, scores]) => [line, scores]));
const EXACT = new Map(DATA.exact);
const PLACES = new Map(DATA.image_ids.map((id, place) => [id, place]));
const SHOWN = new Map(DATA.shown.map((picture) => [picture.image_id, {
  ...picture, lines: new Map(picture.lines), masks: new Map(picture.masks),
  inputs: new Map(picture.inputs),
}]));
const PICTURES = new Map(DATA.pictures);
for (const image of document.querySelectorAll("img[data-key]")) {
  PICTURES.set(image.dataset.key, image.getAttribute("src"));
}

// The score of one picture, PSNR at most the cap; NaN where there is none.
function scoreOf(line, metric, imageId) {
  const place = PLACES.get(imageId);
  const values = (SCORES.get(line) || {})[metric];
  if (place === undefined || !values) return NaN;
  const value = decoded(values[place]);
  return metric === "psnr" ? Math.min(value, DATA.cap) : value;
}

// [mean, low, high] of a line; NaN where there is none.
function summaryOf(line, metric) {
  return ((line.scores || {})[metric] || [null, null, null]).map(decoded);
}

function isExact(line, imageId) {
  return Boolean((EXACT.get(line) || [])[PLACES.get(imageId)]);
}

function metricNamed(name) {
  return METRICS.find((metric) => metric.name === name);
}

function numberText(value, decimals) {
  if (Number.isNaN(value)) return DASH;
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value !== 0 && Math.abs(value) < 0.5 * 10 ** -decimals) {
    const [digits, power] = value.toExponential(1).split("e");
    return `${digits}e${power[0]}${power.slice(1).padStart(2, "0")}`;
  }
  return halfToEven(value, decimals);
}

// `toFixed` rounds 7.25 up where Python's format, which wrote the tables, goes to the even 7.2.
function halfToEven(value, decimals) {
  const doubled = Math.abs(value) * 2 ** (decimals + 1) * 5 ** decimals;
  const exact = Number.isInteger(value * 2 ** (decimals + 1));
  if (!exact || doubled % 2 !== 1) return value.toFixed(decimals);
  const below = (doubled - 1) / 2;
  const rounded = (below + (below % 2)) / 10 ** decimals;
  return (value < 0 ? "-" : "") + rounded.toFixed(decimals);
}

function psnrText(value) {
  if (Number.isNaN(value)) return "";
  return value >= DATA.cap ? `≥ ${DATA.cap} dB` : `${numberText(value, 1)} dB`;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  if (!sorted.length) return NaN;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : NaN;
}

// An element with its attributes and children; texts are texts, never markup.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      made.setAttribute(name, value === true ? "" : value);
    }
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function lineName(line) {
  const run = new Set(DATA.lines.map((other) => other.run)).size > 1 ? `${line.run} · ` : "";
  return `${line.number} · ${run}${line.client} · ${line.attack}`;
}
