// Everything on the page can be read without this script: it sorts and filters the lines and opens
// pictures. Texts of a run become text nodes, never markup.
"use strict";
const DATA = JSON.parse(document.getElementById("page-data").textContent);
const LINES = new Map(DATA.lines.map((line) => [line.number, line]));
const PLACES = new Map(DATA.image_ids.map((id, place) => [id, place]));
const PICTURES = new Map(DATA.pictures);
const SHOWN = new Map(DATA.shown.map((picture) => [picture.image_id, {
  image_id: picture.image_id, lines: new Map(picture.lines),
}]));

const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// The score of one picture, PSNR at most the cap; NaN where there is none.
function score(number, metric, id) {
  const value = LINES.get(number)?.scores[metric]?.[PLACES.get(id)] ?? NaN;
  return Math.min(Number(value), metric === "psnr" ? DATA.cap : Infinity);
}

function isExact(number, id) {
  return Boolean(LINES.get(number)?.exact[PLACES.get(id)]);
}

function numberText(value, metric) {
  if (Number.isNaN(value)) return "–";
  if (metric.name === "psnr" && value >= DATA.cap) return DATA.at_cap;
  const small = value !== 0 && Math.abs(value) < 0.5 * 10 ** -metric.decimals;
  return small ? value.toExponential(1) : value.toFixed(metric.decimals);
}

// Numbers by size, texts by name; what is missing comes last in both directions.
function inOrder(first, second, direction = 1) {
  const missing = [first, second].map((value) => Number.isNaN(value) || value === "");
  if (missing[0] || missing[1]) return missing[0] - missing[1];
  if (typeof first === "number") return direction * (first - second);
  return direction * first.localeCompare(second, "en", { numeric: true });
}

// Lines: sorting and filters -------------------------------------------------------------------

const TABLE = byId("lines");
const HEADS = [...TABLE.tHead.rows[0].cells];

function cellValue(row, column) {
  const text = row.cells[column].textContent.trim();
  if (!HEADS[column].classList.contains("r")) return text === "–" ? "" : text;
  return parseFloat(/-?[\d.]+(e[-+]?\d+)?/.exec(text)?.[0]);
}

function sortLines(column) {
  const numbers = HEADS[column].classList.contains("r") && column > 0;
  const turned = { ascending: -1, descending: 1 }[HEADS[column].ariaSort];
  const direction = turned ?? (numbers ? -1 : 1);
  const rows = [...TABLE.tBodies[0].rows].sort((a, b) =>
    inOrder(cellValue(a, column), cellValue(b, column), direction)
    || inOrder(cellValue(a, 0), cellValue(b, 0)));
  TABLE.tBodies[0].append(...rows);
  for (const head of HEADS) head.ariaSort = "none";
  HEADS[column].ariaSort = direction > 0 ? "ascending" : "descending";
}

function filterLines() {
  const chosen = [...document.querySelectorAll("#filter-selects select")].filter((s) => s.value);
  const words = byId("filter-text").value.toLowerCase().split(/\s+/);
  const rows = [...TABLE.tBodies[0].rows];
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word))
      || chosen.some((s) => `=${row.cells[s.dataset.column].textContent.trim()}` !== s.value);
  }
  byId("lines-count").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} lines`;
  markWide();
}

function buildLines() {
  HEADS.forEach((head, column) => {
    const button = element("button", { type: "button", class: "sort" }, head.textContent);
    button.addEventListener("click", () => sortLines(column));
    head.replaceChildren(button);
    const values = new Set([...TABLE.tBodies[0].rows].map((row) => row.cells[column].textContent.trim()));
    if (head.classList.contains("r") || values.size < 2 || values.size > 40) return;
    byId("filter-selects").append(element("label", {}, `${button.textContent} `,
      element("select", { "data-column": column }, element("option", { value: "" }, "all"),
        ...[...values].sort((a, b) => inOrder(a, b)).map((value) => element("option", { value: `=${value}` }, value)))));
  });
  const kept = new Set([...SHOWN.values()].flatMap((picture) => [...picture.lines.keys()]));
  for (const row of TABLE.tBodies[0].rows) {
    const number = Number(row.cells[0].textContent);
    if (kept.has(number)) row.cells[0].replaceChildren(element("a", { href: `#line=${number}`,
      title: "the pictures of this line" }, String(number)));
  }
  byId("filters").addEventListener("input", filterLines);
  byId("filters").addEventListener("reset", () => setTimeout(filterLines));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").hidden = false;
  filterLines();
}

// Pictures: of a line, and of an image -----------------------------------------------------------

function address(id, number) {
  return `#image=${encodeURIComponent(id)}${number ? `&line=${number}` : ""}`;
}

// All pictures of the line that is chosen, the lowest PSNR first, or the originals.
function fillGallery() {
  const number = Number(byId("gallery-line").value);
  const kept = [...SHOWN.values()].filter((picture) => !number || picture.lines.has(number));
  const psnr = (picture) => score(number, "psnr", picture.image_id);
  if (number) kept.sort((a, b) => inOrder(psnr(a), psnr(b)));
  byId("gallery").replaceChildren(...kept.map((picture) => {
    const id = picture.image_id;
    const every = [...picture.lines.values()];
    const key = number ? picture.lines.get(number).made : every.find((kept) => kept.original)?.original ?? every[0].made;
    const exact = isExact(number, id);
    const said = !number ? id : exact ? "exact" : `${numberText(psnr(picture), DATA.metrics[0])} dB`;
    return element("figure", { class: exact ? "exact" : null },
      element("a", { href: address(id, number) },
        element("img", { src: PICTURES.get(key), alt: `${id}, ${said}`, loading: "lazy" })),
      element("figcaption", {}, said));
  }));
  byId("gallery-count").textContent = number ? `${kept.length} pictures, lowest PSNR first` : "";
}

// A picture with what lies over it on demand: its masked patches, and the picture it should be.
function stage(key, alt, target, mask) {
  const box = element("div", { class: "stage" }, element("div", { class: "pair" },
    element("img", { src: PICTURES.get(key), alt }),
    target ? element("img", { src: PICTURES.get(target), alt: "", class: "target" }) : null));
  if (!mask) return box;
  const rows = mask.split("/");
  const [svg, path] = ["svg", "path"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  svg.setAttribute("viewBox", `0 0 ${rows[0].length} ${rows.length}`);
  path.setAttribute("d", rows.flatMap((row, down) => [...row].map((digit, across) => (digit === "1"
    ? `M${across} ${down}h1v1h-1z` : ""))).join(""));
  svg.append(path);
  box.append(svg);
  return box;
}

function pictureFigure(id, name, attributes, box, ...below) {
  return element("figure", attributes, box, element("figcaption", {}, element("strong", {}, name), ...below));
}

function lineFigure(id, number, kept, chosen) {
  const line = LINES.get(number);
  const exact = isExact(number, id);
  const target = (line.setting === "b" && kept.fed) || kept.original;
  const scores = DATA.metrics.map((metric) => [metric, score(number, metric.name, id)])
    .filter(([, value]) => !Number.isNaN(value));
  const names = [exact && "exact", number === chosen && "chosen"];
  return pictureFigure(id, line.attack, { class: names.filter(Boolean).join(" "), "data-line": number },
    stage(kept.made, `${id} from ${line.attack}`, target, kept.mask),
    exact ? element("b", { class: "warm" }, " exact") : null,
    element("div", {}, `${line.client} · line ${number}`),
    element("dl", {}, ...scores.map(([metric, value]) => element("div", {},
      element("dt", {}, metric.title), element("dd", {}, numberText(value, metric))))));
}

// The original, what clients fed (each distinct picture once), then the lines, the chosen one's client first.
function openImage(id, chosen) {
  const picture = SHOWN.get(id);
  if (!picture) return;
  const dialog = byId("image-dialog");
  Object.assign(dialog.dataset, { image: id, line: chosen || "" });
  byId("image-title").textContent = id;
  const [originals, fed] = [new Set(), new Map()];
  for (const [number, kept] of picture.lines) {
    if (kept.original) originals.add(kept.original);
    if (kept.fed) fed.set(kept.fed, (fed.get(kept.fed) ?? new Set()).add(LINES.get(number).client));
  }
  const other = ([number]) => Number(LINES.get(number).client !== LINES.get(chosen)?.client);
  const lines = [...picture.lines].sort((a, b) => other(a) - other(b) || a[0] - b[0]);
  byId("image-grid").replaceChildren(
    ...[...originals].map((key) => pictureFigure(id, "original", {}, stage(key, `${id}: original`))),
    ...[...fed].map(([key, clients]) => pictureFigure(id, `fed by ${[...clients].join(", ")}`, {}, stage(key, `${id} as fed`))),
    ...lines.map(([number, kept]) => lineFigure(id, number, kept, chosen)));
  if (!dialog.open) dialog.showModal();
  document.querySelector("#image-grid .chosen")?.scrollIntoView({ block: "nearest" });
}

function buildPictures() {
  const dialog = byId("image-dialog");
  const step = (by) => {
    const ids = [...SHOWN.keys()];
    const place = ids.indexOf(dialog.dataset.image) + by;
    location.hash = address(ids[(place + ids.length) % ids.length], dialog.dataset.line);
  };
  byId("image-before").addEventListener("click", () => step(-1));
  byId("image-after").addEventListener("click", () => step(1));
  byId("image-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => history.replaceState(null, "", location.href.split("#")[0] + "#"));
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  });
  for (const box of document.querySelectorAll("[data-shows]")) {
    box.addEventListener("change", () => byId("image-grid").classList.toggle(box.dataset.shows, box.checked));
  }
  const select = byId("gallery-line");
  if (!select) return;
  const kept = new Set([...SHOWN.values()].flatMap((picture) => [...picture.lines.keys()]));
  select.append(...DATA.lines.filter((line) => kept.has(line.number))
    .map((line) => element("option", { value: line.number }, line.name)));
  select.addEventListener("input", fillGallery);
  fillGallery();
}

// The page ---------------------------------------------------------------------------------------

// `#line-5` is a row, `#line=5` its pictures, `#image=NAME&line=5` one picture.
function showAddress() {
  const row = /^#line-\d+$/.test(location.hash) && document.querySelector(location.hash);
  if (row?.hidden) {
    byId("filters").reset();
    setTimeout(() => row.scrollIntoView({ block: "center" }));
  }
  const wanted = new URLSearchParams(location.hash.slice(1).replaceAll("+", "%2B"));
  const number = LINES.has(Number(wanted.get("line"))) ? Number(wanted.get("line")) : 0;
  if (wanted.has("image")) openImage(wanted.get("image"), number);
  else if (number && byId("gallery-line")) {
    byId("gallery-line").value = number;
    fillGallery();
    byId("pictures").scrollIntoView();
  }
}

function markWide() {
  for (const box of document.querySelectorAll(".scroll")) {
    box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1);
  }
}

document.documentElement.classList.add("js");
buildLines();
buildPictures();
addEventListener("hashchange", showAddress);
addEventListener("resize", markWide);
document.addEventListener("toggle", markWide, true);
markWide();
showAddress();
