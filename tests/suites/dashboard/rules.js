// Rules of WCAG 2 that can be told by looking at the document.
const problems = [];
const wrong = (one, why) => problems.push(`${why}: ${one.outerHTML.slice(0, 120)}`);
const all = (selector) => [...document.querySelectorAll(selector)];
const text = (one) => (one?.textContent ?? "").trim();
const named = (ids) => ids.split(" ").map((id) => text(document.getElementById(id))).join(" ").trim();
const name = (one) => one.ariaLabel || (one.hasAttribute("aria-labelledby") ? named(one.getAttribute("aria-labelledby")) : "");

if (document.documentElement.lang !== "en") problems.push("no language");
if (!document.title) problems.push("no title");
for (const landmark of ["header", "nav", "main", "h1"]) if (all(landmark).length !== 1) problems.push(`not one ${landmark}`);
for (const one of all("a, button")) if (!name(one) && !text(one)) wrong(one, "no name");
for (const one of all("input")) if (!name(one) && ![...one.labels].some(text)) wrong(one, "no label");
for (const one of all("section, nav, [role=region], [role=group], ul")) if (!name(one)) wrong(one, "no name");
for (const one of all("[id]")) if (all(`#${CSS.escape(one.id)}`).length !== 1) wrong(one, "id is there twice");
for (const one of all("a[href^='#']")) if (!document.querySelector(one.hash)) wrong(one, "leads nowhere");
for (const one of all("th")) if (!["row", "col"].includes(one.scope) || !text(one)) wrong(one, "no head of anything");
for (const one of all("table")) {
  if (!text(one.caption)) wrong(one, "no caption");
  const columns = one.tHead.rows[0].cells.length;
  for (const row of one.tBodies[0].rows) {
    const cells = [...row.cells].reduce((sum, cell) => sum + cell.colSpan, 0);
    if (cells !== columns) wrong(row, "cells without a head");
  }
}
for (const id of ["health", "trouble"]) {
  const one = document.getElementById(id);
  if (!one.ariaLive && one.role !== "alert") wrong(one, "changes unheard");
}
let level = 1;
for (const one of all("h1, h2, h3")) {
  if (Number(one.tagName[1]) > level + 1) wrong(one, "a heading is left out");
  level = Number(one.tagName[1]);
}
for (const one of all("[tabindex]")) if (one.tabIndex > 0) wrong(one, "out of order");

// Contrast of each text with what is behind it.
const parts = (colour) => colour.match(/[\d.]+/g).map(Number);
const light = (colour) => {
  const [red, green, blue] = parts(colour).map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
const behind = (one) => {
  for (; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    const [, , , alpha = 1] = parts(colour);
    if (alpha === 1) return colour;
    if (alpha !== 0) wrong(one, "half transparent");
  }
  return "rgb(255, 255, 255)";
};
let looked = 0;
for (const one of all("body *")) {
  const own = [...one.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
  if (!own || !one.checkVisibility()) continue;
  looked += 1;
  const [front, back] = [light(getComputedStyle(one).color), light(behind(one))];
  const contrast = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  if (contrast < 4.5) wrong(one, `contrast ${contrast.toFixed(2)}`);
}
if (looked < 30) problems.push(`only ${looked} texts`);
return problems;
