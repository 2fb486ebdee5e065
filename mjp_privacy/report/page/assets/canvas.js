// Drawings over a picture: which patches were masked, and where it differs from the original.
const MASK_FILL = "rgba(0, 0, 0, 0.55)";
const MASK_LINE = "rgba(255, 255, 255, 0.8)";
const ERROR_GAIN = 4;

function loaded(address) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => resolve(image);
    image.onerror = () => reject(new Error("a picture of this page does not decode"));
    image.src = address;
  });
}

function maskCanvas(mask, width, height) {
  const side = Math.round(Math.sqrt(mask.length));
  if (!side || side * side !== mask.length) return null;
  const canvas = element("canvas", { width, height, class: "overlay mask", "aria-hidden": "true" });
  const pen = canvas.getContext("2d");
  const [x, y] = [width / side, height / side];
  pen.lineWidth = Math.max(1, width / 224);
  [...mask].forEach((digit, place) => {
    if (digit !== "1") return;
    const [left, top] = [(place % side) * x, Math.floor(place / side) * y];
    pen.fillStyle = MASK_FILL;
    pen.fillRect(left, top, x, y);
    pen.strokeStyle = MASK_LINE;
    pen.strokeRect(left + 0.5, top + 0.5, x - 1, y - 1);
  });
  return canvas;
}

function pixels(image, width, height) {
  const canvas = element("canvas", { width, height });
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.drawImage(image, 0, 0, width, height);
  return pen.getImageData(0, 0, width, height);
}

// |reconstruction − target| × 4 in each colour, at the reconstruction's size.
async function errorCanvas(address, targetAddress) {
  const [image, truth] = await Promise.all([loaded(address), loaded(targetAddress)]);
  const [width, height] = [image.naturalWidth, image.naturalHeight];
  const found = pixels(image, width, height);
  const target = pixels(truth, width, height);
  for (let i = 0; i < found.data.length; i += 1) {
    const wrong = Math.abs(found.data[i] - target.data[i]) * ERROR_GAIN;
    found.data[i] = i % 4 === 3 ? 255 : Math.min(255, wrong);
  }
  const canvas = element("canvas", { width, height, class: "overlay error", "aria-hidden": "true" });
  canvas.getContext("2d").putImageData(found, 0, 0);
  return canvas;
}
