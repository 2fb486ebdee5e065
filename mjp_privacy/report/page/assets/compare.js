// Two lines side by side: of one run or of two, over the pictures that both have.
const LARGEST = 12;

function comparableLines() {
  return DATA.lines.filter((line) => SCORES.has(line.number));
}

function common(first, second, metric) {
  return DATA.image_ids
    .map((id) => [id, scoreOf(first, metric, id), scoreOf(second, metric, id)])
    .filter(([, a, b]) => Number.isFinite(a) && Number.isFinite(b));
}

function signed(value, decimals) {
  const text = numberText(value, decimals);
  return value > 0 ? `+${text}` : text;
}

function tableOf(caption, header, rows) {
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {}, element("caption", {}, caption),
      element("thead", {}, element("tr", {}, ...header.map((text, place) => element("th",
        { scope: "col", class: place ? "r" : null }, text)))),
      element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells.map((cell, place) => element(
        place ? "td" : "th", place ? { class: "r" } : { scope: "row" }, cell)))))));
}

function meansTable(first, second) {
  const rows = METRICS.map(({ name, title, decimals }) => {
    const pairs = common(first, second, name);
    const changes = pairs.map(([, a, b]) => b - a);
    const means = [1, 2].map((side) => mean(pairs.map((pair) => pair[side])));
    return [title, ...means.map((value) => numberText(value, decimals)),
      signed(means[1] - means[0], decimals), signed(median(changes), decimals), String(pairs.length)];
  });
  return tableOf("Means over common pictures", ["", `line ${first}`, `line ${second}`,
    "difference of means", "median difference per picture", "common pictures"], rows);
}

function imageCell(id) {
  if (!SHOWN.has(id)) return id;
  return element("a", { href: address(id, null) }, id);
}

function largestTable(first, second, metric) {
  const pairs = common(first, second, metric.name);
  pairs.sort((x, y) => Math.abs(y[2] - y[1]) - Math.abs(x[2] - x[1]));
  const rows = pairs.slice(0, LARGEST).map(([id, a, b]) => [imageCell(id),
    numberText(a, metric.decimals), numberText(b, metric.decimals), signed(b - a, metric.decimals)]);
  return tableOf(`Largest differences in ${metric.title}`,
    ["picture", `line ${first}`, `line ${second}`, "difference"], rows);
}

function showComparison() {
  const [first, second] = ["first", "second"].map((side) => Number(
    document.getElementById(`compare-${side}`).value));
  const metric = metricNamed(document.getElementById("compare-metric").value);
  document.getElementById("compare-result").replaceChildren(
    meansTable(first, second), largestTable(first, second, metric));
}

// The two lines to start with: the same attack on the same client in two runs, else the same attack
// in two runs, else the first two.
function startingPair(lines) {
  const inTwoRuns = (keys) => lines.map((first) => [first, lines.find((second) =>
    second.run !== first.run && keys.every((key) => second[key] === first[key]))])
    .find(([, second]) => second);
  return inTwoRuns(["attack", "model", "setting", "gamma", "uploads"]) || inTwoRuns(["attack"])
    || lines.slice(0, 2);
}

function buildComparison() {
  const lines = comparableLines();
  if (lines.length < 2 || !METRICS.length) return;
  const start = lines.filter((line) => !line.folded);
  const usual = start.length > 1 ? start : lines;
  const pair = startingPair(usual);
  for (const [place, side] of ["first", "second"].entries()) {
    const select = document.getElementById(`compare-${side}`);
    select.append(...lines.map((line) => element("option", { value: line.number }, lineName(line))));
    select.value = pair[place].number;
    select.addEventListener("input", showComparison);
  }
  const select = document.getElementById("compare-metric");
  select.append(...METRICS.map(({ name, title }) => element("option", { value: name }, title)));
  select.addEventListener("input", showComparison);
  document.getElementById("compare").hidden = false;
  showComparison();
}
