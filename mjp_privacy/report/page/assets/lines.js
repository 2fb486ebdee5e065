// The table of lines: sorting, hiding what the filters leave out, and the CSV of what is shown.
const TABLE = document.getElementById("lines");

function sortValue(line, key) {
  if (metricNamed(key)) return summaryOf(line, key)[0];
  const value = line[key];
  if (key === "gamma" || key === "median_psnr") return decoded(value);
  return (key === "exact" || key === "above_20") && !line.n ? NaN : value;
}

function missing(value) {
  return value === "" || Number.isNaN(value);
}

// Numbers as numbers, texts as texts, and what is missing last in both directions.
function compared(a, b, direction) {
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  if (typeof a === "number") return a === b ? 0 : direction * (a < b ? -1 : 1);
  return direction * String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortLines(key, direction) {
  const rows = [...TABLE.tBodies[0].rows];
  const found = new Map(rows.map((row) => [row, LINES.get(Number(row.dataset.line))]));
  rows.sort((a, b) => {
    const [first, second] = [found.get(a), found.get(b)];
    return compared(sortValue(first, key), sortValue(second, key), direction)
      || first.number - second.number;
  });
  TABLE.tBodies[0].append(...rows);
  for (const cell of TABLE.tHead.rows[0].cells) {
    if (!cell.dataset.key) continue;
    const sorted = direction > 0 ? "ascending" : "descending";
    cell.setAttribute("aria-sort", cell.dataset.key === key ? sorted : "none");
  }
}

function addSortButtons() {
  for (const cell of TABLE.tHead.rows[0].cells) {
    const key = cell.dataset.key;
    if (!key) continue;
    const button = element("button", { type: "button", class: "sort", title: cell.title || null });
    button.append(...cell.childNodes);
    cell.removeAttribute("title");
    cell.append(button);
    cell.setAttribute("aria-sort", key === "number" ? "ascending" : "none");
    button.addEventListener("click", () => {
      const first = ["psnr", "median_psnr", "exact", "above_20", "ssim"].includes(key) ? -1 : 1;
      const turned = { ascending: -1, descending: 1 }[cell.getAttribute("aria-sort")];
      sortLines(key, turned || first);
    });
  }
}

function showFitting() {
  let shown = 0;
  for (const row of TABLE.tBodies[0].rows) {
    row.hidden = !fits(LINES.get(Number(row.dataset.line)));
    shown += !row.hidden;
  }
  const total = DATA.lines.length;
  document.getElementById("lines-count").textContent = `${shown} of ${total} lines shown`;
  document.getElementById("lines-none").hidden = shown > 0;
}

// A line that an address names is shown, whatever the filters say.
function revealLine(number) {
  const row = document.getElementById(`line-${number}`);
  if (!row) return;
  if (row.hidden) {
    document.getElementById("filters").reset();
    document.getElementById("filter-folded").checked = LINES.get(number).folded;
    showFitting();
  }
  row.scrollIntoView({ block: "center" });
}

// A spreadsheet must not take a text for a formula; numbers are written as they are.
function csvCell(value) {
  if (typeof value === "number") {
    if (Number.isNaN(value)) return "";
    return Number.isFinite(value) ? String(value) : value > 0 ? "inf" : "-inf";
  }
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function shownCsv() {
  const plain = ["number", "run", "model", "client", "setting", "gamma", "dtype", "attack", "role",
    "uploads", "n", "not_scored", "exact", "above_20", "of", "median_psnr"];
  const parts = METRICS.flatMap(({ name }) => ["mean", "low", "high"].map((p) => `${name}_${p}`));
  const rows = [[...plain, ...parts, "marks", "remark"]];
  for (const row of TABLE.tBodies[0].rows) {
    if (row.hidden) continue;
    const line = LINES.get(Number(row.dataset.line));
    rows.push([
      ...plain.map((key) => (typeof line[key] === "string" ? line[key] : sortValue(line, key))),
      ...METRICS.flatMap(({ name }) => summaryOf(line, name)),
      line.marks.join(" "), line.remark,
    ]);
  }
  return rows.map((cells) => cells.map(csvCell).join(",")).join("\r\n") + "\r\n";
}

function downloadCsv() {
  const blob = new Blob(["\ufeff", shownCsv()], { type: "text/csv;charset=utf-8" });
  const address = URL.createObjectURL(blob);
  const link = element("a", { href: address, download: "lines.csv" });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
