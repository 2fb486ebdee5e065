// From a line to its pictures, and from a picture to what every attack made of it.
const LINE_DIALOG = document.getElementById("line-dialog");
const IMAGE_DIALOG = document.getElementById("image-dialog");
const QUANTILES = [[0, "lowest"], [0.05, "5 %"], [0.25, "25 %"], [0.5, "median"], [0.75, "75 %"],
  [0.95, "95 %"], [1, "highest"]];

function address(imageId, line) {
  const suffix = line === null ? "" : `&line=${line}`;
  return `#image=${encodeURIComponent(imageId)}${suffix}`;
}

function thumb(imageId, line, key, caption, badges = []) {
  const warm = line !== null && isExact(line, imageId);
  return element("figure", { class: warm ? "exact" : null },
    element("a", { href: address(imageId, line) },
      element("img", { src: PICTURES.get(key), alt: `${imageId}${caption ? `, ${caption}` : ""}`,
        loading: "lazy" })),
    element("figcaption", {}, element("span", { class: "score" }, warm ? `${caption} · exact` : caption),
      ...badges.flatMap((badge) => [element("span", { class: "badge" }, badge), " "])));
}

// For each quantile of all scored pictures, the kept picture whose score is nearest to it; among
// equal ones that whose place is nearest. `kept` is in the order of its scores.
function quantileBadges(line, kept) {
  const scores = DATA.image_ids.map((id) => scoreOf(line, "psnr", id)).filter((v) => !Number.isNaN(v));
  scores.sort((a, b) => a - b);
  const badges = new Map();
  const known = kept.filter(([, value]) => !Number.isNaN(value));
  if (!known.length) return { badges, scores };
  for (const [share, label] of QUANTILES) {
    const wanted = scores[Math.round(share * (scores.length - 1))];
    const place = share * (known.length - 1);
    const ranked = known.map(([id, value], at) => [Math.abs(value - wanted), Math.abs(at - place), id]);
    const [, , nearest] = ranked.reduce((a, b) => (b[0] - a[0] || b[1] - a[1]) < 0 ? b : a);
    badges.set(nearest, [...(badges.get(nearest) || []), label]);
  }
  return { badges, scores };
}

function openLine(number) {
  const line = LINES.get(number);
  LINE_DIALOG.dataset.line = number;
  const kept = [...SHOWN.values()].filter((picture) => picture.lines.has(number))
    .map((picture) => [picture.image_id, scoreOf(number, "psnr", picture.image_id)]);
  kept.sort((a, b) => compared(a[1], b[1], 1));
  const { badges, scores } = quantileBadges(number, kept);
  const grid = document.getElementById("line-dialog-grid");
  grid.replaceChildren(...kept.map(([id, value]) => thumb(
    id, number, SHOWN.get(id).lines.get(number), psnrText(value) || id, badges.get(id))));
  document.getElementById("line-dialog-title").textContent = `Line ${lineName(line)}`;
  document.getElementById("line-dialog-text").textContent = scores.length
    ? `${kept.length} pictures kept of ${scores.length} scored, lowest PSNR first. A quantile's mark `
      + "stands on the kept picture nearest to that quantile of all scored ones."
    : `${kept.length} pictures kept; none has a PSNR.`;
  if (!LINE_DIALOG.open) LINE_DIALOG.showModal();
}

function scoreList(line, imageId) {
  const entries = METRICS.map((metric) => [metric, scoreOf(line, metric.name, imageId)])
    .filter(([, value]) => !Number.isNaN(value));
  return element("dl", { class: "scores" }, ...entries.map(([metric, value]) => element("div", {},
    element("dt", {}, metric.title),
    element("dd", {}, metric.name === "psnr" ? psnrText(value)
      : numberText(value, metric.decimals)))));
}

function stage(key, alt, mask) {
  const box = element("div", { class: "stage", "data-key": key });
  const image = element("img", { src: PICTURES.get(key), alt });
  box.append(image);
  if (mask) box.dataset.mask = mask;
  return box;
}

function reconstructionFigure(picture, number, key, chosen) {
  const line = LINES.get(number);
  const exact = isExact(number, picture.image_id);
  return element("figure", { class: [exact && "exact", line.folded && "folded",
    number === chosen && "chosen"].filter(Boolean).join(" "), "data-line": number },
  stage(key, `${picture.image_id} from ${line.attack}`, picture.masks.get(number)),
  element("figcaption", {},
    element("strong", {}, line.attack), " ",
    exact ? element("span", { class: "badge warm" }, "exact") : null,
    element("span", { class: "muted" }, `${line.client} · line ${number}`),
    scoreList(number, picture.image_id)));
}

function plainFigure(picture, key, label) {
  return element("figure", { class: "plain" }, stage(key, `${picture.image_id}: ${label}`),
    element("figcaption", {}, element("strong", {}, label)));
}

// Lines of the chosen line's client stand first.
function linesOf(picture, chosen) {
  const client = chosen === null ? null : LINES.get(chosen).client;
  const other = ([number]) => Number(client !== null && LINES.get(number).client !== client);
  return [...picture.lines].filter(([number]) => LINES.has(number))
    .sort((a, b) => other(a) - other(b) || a[0] - b[0]);
}

// What a line's picture is compared with: in setting (b) that is what the client fed.
function targetOf(picture, number) {
  const fed = LINES.get(number).setting === "b" ? picture.inputs.get(number) : undefined;
  return fed || picture.original;
}

// What clients fed, each distinct picture once; the chosen line's first.
function fedFigures(picture, chosen) {
  const clients = new Map();
  for (const [number, key] of picture.inputs) {
    if (!LINES.has(number)) continue;
    clients.set(key, (clients.get(key) || new Set()).add(LINES.get(number).client));
  }
  const own = picture.inputs.get(chosen);
  return [...clients].sort((a, b) => Number(b[0] === own) - Number(a[0] === own))
    .map(([key, names]) => plainFigure(picture, key, `fed by ${[...names].join(", ")}`));
}

function openImage(imageId, chosen) {
  const picture = SHOWN.get(imageId);
  if (!picture) return;
  IMAGE_DIALOG.dataset.image = imageId;
  IMAGE_DIALOG.dataset.line = chosen === null ? "" : chosen;
  document.getElementById("image-dialog-title").textContent = imageId;
  document.getElementById("image-dialog-text").textContent =
    "Drawn from the small 8-bit pictures in this page; scores are of the full reconstructions."
    + (picture.original
      ? " Errors are against the original, in setting (b) against what the client fed."
      : " There is no original here: recorded uploads come without truth.");
  document.getElementById("image-dialog-grid").replaceChildren(
    ...(picture.original ? [plainFigure(picture, picture.original, "original")] : []),
    ...fedFigures(picture, chosen),
    ...linesOf(picture, chosen)
      .map(([number, key]) => reconstructionFigure(picture, number, key, chosen)));
  document.getElementById("show-mask").disabled = !picture.masks.size;
  document.getElementById("show-error").disabled = !picture.original;
  drawOverlays();
  if (!IMAGE_DIALOG.open) IMAGE_DIALOG.showModal();
  const figure = document.querySelector("#image-dialog-grid .chosen");
  if (figure) figure.scrollIntoView({ block: "nearest" });
}

let drawing = 0;

// Draws what is ticked over every reconstruction; what is not ticked is taken away.
async function drawOverlays() {
  drawing += 1;
  const turn = drawing;
  const [mask, error] = ["show-mask", "show-error"].map((id) => document.getElementById(id))
    .map((box) => box.checked && !box.disabled);
  const picture = SHOWN.get(IMAGE_DIALOG.dataset.image);
  const grid = document.getElementById("image-dialog-grid");
  grid.classList.toggle("with-folded", document.getElementById("show-folded").checked);
  for (const box of grid.querySelectorAll("figure[data-line] .stage")) {
    const source = PICTURES.get(box.dataset.key);
    const target = targetOf(picture, Number(box.closest("figure").dataset.line));
    const drawn = error ? await errorCanvas(source, PICTURES.get(target)) : null;
    const { naturalWidth, naturalHeight } = await loaded(source);
    const grey = mask && box.dataset.mask
      ? maskCanvas(box.dataset.mask, naturalWidth, naturalHeight) : null;
    if (turn !== drawing) return;
    box.querySelectorAll("canvas").forEach((canvas) => canvas.remove());
    box.append(...[drawn, grey].filter(Boolean));
  }
}

function stepImage(step) {
  const ids = [...SHOWN.keys()];
  const place = ids.indexOf(IMAGE_DIALOG.dataset.image);
  const line = IMAGE_DIALOG.dataset.line;
  location.hash = address(ids[(place + step + ids.length) % ids.length], line ? Number(line) : null);
}

function buildGallery() {
  const gallery = document.getElementById("gallery");
  if (!gallery) return;
  gallery.append(...[...SHOWN.values()].map((picture) => {
    const key = picture.original || [...picture.lines.values()][0];
    return key ? thumb(picture.image_id, null, key, picture.image_id) : null;
  }).filter(Boolean));
}
