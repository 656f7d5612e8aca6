// Shared by the three canvases: sharp pixels, the theme's colours, and a redraw when either changes.

/**
 * @typedef {object} Canvas2d
 * @property {CanvasRenderingContext2D} context scaled so that units are CSS pixels
 * @property {number} width
 * @property {number} height
 */

/** Clears the canvas at its present size. @param {HTMLCanvasElement} canvas @returns {Canvas2d} */
export function clearCanvas(canvas) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** @type {Map<string, string>} */
const colours = new Map();
addEventListener("themechange", () => colours.clear());

/** A colour of the theme by the name of its custom property. @param {string} name */
export function colour(name) {
  let value = colours.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    colours.set(name, value);
  }
  return value;
}

/** Calls `draw` whenever the canvas changes size or the theme changes. @param {HTMLCanvasElement} canvas @param {() => void} draw */
export function redrawOnChange(canvas, draw) {
  new ResizeObserver(() => draw()).observe(canvas);
  addEventListener("themechange", () => draw());
}

/** @param {CanvasRenderingContext2D} context @param {number} [size] */
export function setFont(context, size = 11) {
  context.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  context.fillStyle = colour("soft");
}
