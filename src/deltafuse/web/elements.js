"use strict";
// What the other scripts build the page of. Texts of a model are only ever set as text, never read as HTML.

/** An element with attributes and children; `onclick` and the like are listeners. */
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A table; cells are texts or elements, those of `mono` columns are shown as code. */
function table(headings, rows, mono = []) {
  const head = el("tr", {}, ...headings.map((text) => el("th", { scope: "col" }, text)));
  const cell = (content, column) => el("td", { class: mono.includes(column) ? "path" : null }, content);
  return el("div", { class: "wide" }, el("table", {}, head, ...rows.map((row) => el("tr", {}, ...row.map(cell)))));
}

/** Names and what they are, line by line. */
function facts(rows) {
  const lines = rows.map(([name, content]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, content)));
  return el("div", { class: "wide" }, el("table", { class: "facts" }, ...lines));
}

/** 1.5e-12, as the terminal shows it. */
function sci(value) {
  return value === null || value === undefined ? "" : value.toExponential(1);
}

function count(number, what) {
  return `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
}

/** What a script element of the page holds, base64 of gzip, as text. */
async function unpacked(id) {
  const letters = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}
