// Which lines are shown: one select for each thing that differs, a text, and the folded lines.
const FILTERED = [
  ["run", "run"], ["model", "model"], ["client", "client"], ["setting", "setting"],
  ["gamma", "γ"], ["attack", "attack"],
];

function filterText(line, key) {
  const value = key === "gamma" ? decoded(line.gamma) : line[key];
  return Number.isNaN(value) ? DASH : String(value);
}

function buildFilters(changed) {
  const form = document.getElementById("filters");
  const box = document.getElementById("filter-selects");
  for (const [key, label] of FILTERED) {
    const values = [...new Set(DATA.lines.map((line) => filterText(line, key)))];
    if (values.length < 2) continue;
    values.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const select = element("select", { "data-key": key, id: `filter-${key}` },
      element("option", { value: "" }, "all"),
      ...values.map((value) => element("option", { value: `=${value}` }, value)));
    box.append(element("label", { class: "field" }, `${label} `, select));
  }
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("filter-reset").addEventListener("click", () => {
    form.reset();
    changed();
  });
  form.hidden = false;
}

function fits(line) {
  if (line.folded && !document.getElementById("filter-folded").checked) return false;
  for (const select of document.querySelectorAll("#filter-selects select")) {
    if (select.value && select.value !== `=${filterText(line, select.dataset.key)}`) return false;
  }
  const words = document.getElementById("filter-text").value.toLowerCase().split(/\s+/);
  const text = [line.run, line.model, line.client, line.attack, line.setting, line.dtype,
    line.role, line.remark].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}
