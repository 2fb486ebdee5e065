// Ties the parts to the page: addresses after the #, buttons, printing.
function showAddress() {
  const text = location.hash.slice(1);
  const line = /^line-(\d+)$/.exec(text);
  if (line) revealLine(Number(line[1]));
  if (!text.includes("=")) return;
  const wanted = new URLSearchParams(text.replaceAll("+", "%2B"));
  const number = wanted.has("line") ? Number(wanted.get("line")) : null;
  const known = LINES.has(number) ? number : null;
  if (wanted.has("image")) openImage(wanted.get("image"), known);
  else if (known !== null) openLine(known);
}

function setAddress(hash) {
  try {
    history.replaceState(null, "", location.href.split("#")[0] + hash);
  } catch {
    // Some browsers refuse this to a file; the view is only not in the address then.
  }
}

function addDialogs() {
  for (const dialog of [LINE_DIALOG, IMAGE_DIALOG]) {
    dialog.querySelector(".close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close();
    });
  }
  LINE_DIALOG.addEventListener("close", () => setAddress(""));
  IMAGE_DIALOG.addEventListener("close", () => {
    setAddress(LINE_DIALOG.open ? `#line=${LINE_DIALOG.dataset.line}` : "");
  });
  for (const id of ["show-mask", "show-error", "show-folded"]) {
    document.getElementById(id).addEventListener("change", drawOverlays);
  }
  document.getElementById("image-before").addEventListener("click", () => stepImage(-1));
  document.getElementById("image-after").addEventListener("click", () => stepImage(1));
  IMAGE_DIALOG.addEventListener("keydown", (event) => {
    if (event.target.matches("input")) return;
    if (event.key === "ArrowLeft") stepImage(-1);
    if (event.key === "ArrowRight") stepImage(1);
  });
}

function addOpenButtons() {
  const kept = new Set([...SHOWN.values()].flatMap((picture) => [...picture.lines.keys()]));
  for (const row of TABLE.tBodies[0].rows) {
    const number = Number(row.dataset.line);
    const button = row.querySelector("button.open");
    if (!kept.has(number)) continue;
    button.hidden = false;
    button.addEventListener("click", () => {
      openLine(number);
      setAddress(`#line=${number}`);
    });
  }
}

function addCopyButton() {
  const button = document.getElementById("copy");
  if (!button) return;
  button.hidden = false;
  button.addEventListener("click", async () => {
    const command = document.getElementById("reproduce");
    const said = document.getElementById("copied");
    try {
      await navigator.clipboard.writeText(command.textContent);
      said.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(command);
      said.textContent = "selected: copy it with your keyboard";
    }
  });
}

// On paper every detail is open; afterwards it is as the reader left it.
function openForPrint() {
  const opened = [];
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details:not([open])")) {
      details.open = true;
      opened.push(details);
    }
  });
  addEventListener("afterprint", () => {
    for (const details of opened.splice(0)) details.open = false;
  });
}

document.documentElement.classList.add("js");
addSortButtons();
buildFilters(showFitting);
showFitting();
document.getElementById("download-csv").addEventListener("click", downloadCsv);
addDialogs();
addOpenButtons();
addCopyButton();
buildGallery();
buildComparison();
openForPrint();
addEventListener("hashchange", showAddress);
showAddress();
