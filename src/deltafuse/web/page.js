"use strict";
// The list of sites: filled lazily, filtered, reached by links of the layer map.

const lines = JSON.parse(document.getElementById("lines").textContent);
let known = null;

/** What is known of all sites, unpacked when the first one is opened. */
function details() {
  known ??= unpacked("details").then(JSON.parse);
  return known;
}

async function fill(element, index) {
  try {
    const { sites, pictures } = await details();
    element.append(siteInside(sites[index], pictures));
  } catch (error) {
    element.append(el("p", { class: "inside bad" }, `This cannot be shown here (${error.message}): a browser of 2023 or later can.`));
  }
}

const elements = lines.map((line, index) => siteLine(line, index, fill));
const texts = lines.map((line) => Object.values(line).join(" ").toLowerCase());
const filter = document.getElementById("filter");
const status = document.getElementById("status");

function refilter() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (index) => (!status.value || lines[index].status === status.value) && words.every((word) => texts[index].includes(word));
  let shown = 0;
  elements.forEach((element, index) => {
    element.hidden = !fits(index);
    shown += element.hidden ? 0 : 1;
  });
  document.getElementById("found").textContent = `${shown} of ${count(lines.length, "site")}`;
}

/** Opens the site that the address names. */
function follow() {
  const site = document.getElementById(location.hash.slice(1));
  if (!site?.classList.contains("site")) return;
  site.hidden = false;
  site.open = true;
  site.scrollIntoView();
  site.querySelector("summary").focus({ preventScroll: true });
}

document.getElementById("list").append(...elements);
filter.addEventListener("input", refilter);
status.addEventListener("change", refilter);
window.addEventListener("hashchange", follow);
refilter();
// A page of one site is about that site.
if (elements.length === 1) elements[0].open = true;
follow();
