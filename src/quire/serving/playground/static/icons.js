// Line icons, drawn on a grid of 20 by 20. They are decoration: the button around one carries the name.

const SVG = "http://www.w3.org/2000/svg";
const PATHS = {
  sidebar: "M3 4.5h14v11H3zM8 4.5v11",
  sliders: "M3 6h7m4 0h3M3 14h3m4 0h7M12 4v4M8 12v4",
  chip: "M6 6h8v8H6zM8 3v3m4-3v3M8 14v3m4-3v3M3 8h3m-3 4h3m8-4h3m-3 4h3",
  plus: "M10 4v12M4 10h12",
  more: "M5 10h.01M10 10h.01M15 10h.01",
  copy: "M7 7h9v9H7zM4 13V4h9",
  check: "M4 10.5l4 4 8-9",
  again: "M15.5 8A6 6 0 1 0 16 11.5M16 4v4h-4",
  edit: "M4 16l.8-3.6L13 4.2l2.8 2.8-8.2 8.2z",
  next: "M4 5l6 5-6 5zM14 5v10",
  previous: "M12 5l-5 5 5 5",
  following: "M8 5l5 5-5 5",
  clock: "M10 3a7 7 0 1 1 0 14 7 7 0 0 1 0-14zM10 6v4l3 2",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M5.5 5.5h9v9h-9z",
  close: "M5 5l10 10M15 5L5 15",
};

/** @param {keyof typeof PATHS} name @returns {SVGSVGElement} */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 20 20", width: "18", height: "18", "aria-hidden": "true", class: "icon" })) {
    svg.setAttribute(key, value);
  }
  svg.dataset.name = name;
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}
