"use strict";
// A site's graph as a picture: laid out in a worker when it is opened, to be moved, zoomed and searched.

const LAYOUT_SECONDS = 60;
const LISTED = 100;
const ZOOM = 1.3;
const SVG = "http://www.w3.org/2000/svg";

const layouts = { worker: null, waiting: new Map(), next: 0 };

/** The worker that lays out; made for the first picture. */
async function layoutWorker() {
  const script = JSON.parse(document.getElementById("worker").textContent);
  const url = URL.createObjectURL(new Blob([await unpacked("layout"), "\n", script], { type: "text/javascript" }));
  const worker = new Worker(url);
  worker.onmessage = ({ data }) => settle(data.id, data);
  worker.onerror = (event) => [...layouts.waiting.keys()].forEach((id) => settle(id, { error: event.message }));
  return worker;
}

function settle(id, answer) {
  layouts.waiting.get(id)?.(answer);
  layouts.waiting.delete(id);
}

/** The SVG of a graph; throws what went wrong. */
async function laidOut(dot) {
  layouts.worker ??= layoutWorker();
  const worker = await layouts.worker;
  const id = layouts.next++;
  const answer = await new Promise((resolve) => {
    layouts.waiting.set(id, resolve);
    setTimeout(() => settle(id, { error: `no answer within ${LAYOUT_SECONDS} s` }), LAYOUT_SECONDS * 1000);
    worker.postMessage({ id, dot });
  });
  if (answer.error) throw new Error(answer.error);
  return answer.svg;
}

function quoted(text) {
  return `"${text.replace(/\\/g, "\\\\").replace(/"/g, '\\"').replace(/\s+/g, " ")}"`;
}

/** The graph in Graphviz's language. Box i is the node `bi`. */
function dotOf(picture) {
  const shapes = { operand: "ellipse", result: "ellipse" };
  const classes = { fused: "target" };
  const lines = picture.boxes.map(([op, kind, number], i) => {
    const label = quoted(op.slice(0, 40)).slice(1, -1) + (number > 1 ? `\\n\u00d7${number}` : "");
    const style = kind === "operand" || kind === "result" ? "" : ' style="rounded"';
    return `b${i} [id="b${i}" label="${label}" class="${classes[kind] ?? kind}" shape=${shapes[kind] ?? "box"}${style}]`;
  });
  const arrows = picture.edges.map(([from, to, number]) => `b${from} -> b${to}${number > 1 ? ` [label="${number}"]` : ""}`);
  const look = 'node [fontname="Courier" fontsize=11 height=0.3 margin="0.1,0.04"] edge [fontname="Courier" fontsize=9 arrowsize=0.6]';
  return `digraph { bgcolor="transparent" ranksep=0.3 nodesep=0.2 ${look}\n${lines.join("\n")}\n${arrows.join("\n")} }`;
}

/** Where a box of a drawn graph has its middle. */
function middle(node) {
  const shape = node.getBBox();
  const offset = node.parentNode.transform.baseVal.consolidate().matrix;
  return { x: shape.x + shape.width / 2 + offset.e, y: shape.y + shape.height / 2 + offset.f };
}

/** Moves and zooms an SVG inside its pane: by pointer, wheel, keys and buttons. */
function navigable(pane, svg) {
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const view = { x: 0, y: 0, w: width, h: height };
  svg.removeAttribute("width");
  svg.removeAttribute("height");
  const show = () => svg.setAttribute("viewBox", `${view.x} ${view.y} ${view.w} ${view.h}`);
  const ratio = () => pane.clientHeight / Math.max(1, pane.clientWidth);
  const look = (x, y, w) => { Object.assign(view, { w, h: w * ratio() }); view.x = x - view.w / 2; view.y = y - view.h / 2; show(); };
  const zoom = (factor, x = view.x + view.w / 2, y = view.y + view.h / 2) => {
    const w = Math.min(Math.max(view.w * factor, 60), 4 * Math.max(width, height / ratio()));
    const scale = w / view.w;
    Object.assign(view, { x: x - (x - view.x) * scale, y: y - (y - view.y) * scale, w, h: w * ratio() });
    show();
  };
  const fit = () => look(width / 2, height / 2, 1.05 * Math.max(width, height / ratio()));
  // At first letters have about the size of those around the picture, and its top is seen.
  const start = () => {
    const w = Math.min(Math.max(width, 0.8 * pane.clientWidth), 1.2 * pane.clientWidth);
    const top = [...svg.querySelectorAll(".node")].map(middle).sort((a, b) => a.y - b.y)[0];
    look(w < width && top ? top.x : width / 2, (w * ratio()) / 2 - 10, w);
  };
  const move = (right, down) => { view.x += right * view.w; view.y += down * view.h; show(); };
  const at = (event) => {
    const box = pane.getBoundingClientRect();
    return [view.x + ((event.clientX - box.left) / box.width) * view.w, view.y + ((event.clientY - box.top) / box.height) * view.h];
  };
  pane.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== pane) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? ZOOM : 1 / ZOOM, ...at(event));
  }, { passive: false });
  pane.addEventListener("pointermove", (event) => {
    if (event.buttons !== 1) return;
    move(-event.movementX / pane.clientWidth, -event.movementY / pane.clientHeight);
  });
  const keys = {
    ArrowLeft: () => move(-0.15, 0), ArrowRight: () => move(0.15, 0), ArrowUp: () => move(0, -0.15),
    ArrowDown: () => move(0, 0.15), "+": () => zoom(1 / ZOOM), "=": () => zoom(1 / ZOOM), "-": () => zoom(ZOOM), 0: fit,
  };
  pane.addEventListener("keydown", (event) => {
    if (event.target !== pane || event.ctrlKey || event.metaKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  start();
  return { zoom, fit, look, width: () => view.w };
}

/** The picture with its controls, laid out as soon as it is opened. */
function pictureView(title, picture, names) {
  const nodes = picture.ops.length;
  const hidden = picture.box_of.filter((box) => box < 0).length;
  const pane = el("div", { class: "pane", tabindex: 0, role: "group", "aria-label": `${title}: arrow keys move, + and - zoom, 0 fits` },
    el("p", { class: "message soft", role: "status" }, "Laying out \u2026"));
  const told = el("p", { class: "told", role: "status" });
  const list = el("ul", { class: "nodes", "aria-label": "nodes found" });
  const state = { view: null, chosen: -1 };
  const boxNode = (box) => pane.querySelector(`[id="b${box}"]`);

  const choose = (box) => {
    pane.querySelectorAll(".chosen").forEach((node) => node.classList.remove("chosen"));
    const [op, , number] = picture.boxes[box];
    const members = picture.box_of.flatMap((other, i) => (other === box ? [names[i]] : []));
    const more = number > members.length || members.length > 3 ? ` and ${(members.length - 3).toLocaleString("en")} more` : "";
    const called = members.length ? `: ${members.slice(0, 3).join(", ")}${members.length > 3 ? more : ""}` : "";
    told.textContent = `${op}${number > 1 ? ` \u00d7${number}` : ""}${called}${picture.details[box] ? ` (${picture.details[box]})` : ""}`;
    const node = boxNode(box);
    if (!node || !state.view) return;
    node.classList.add("chosen");
    const { x, y } = middle(node);
    state.view.look(x, y, Math.min(state.view.width(), 700));
  };

  const search = (text) => {
    pane.querySelectorAll(".hit").forEach((node) => node.classList.remove("hit"));
    const wanted = text.trim().toLowerCase();
    const fits = (i) => names[i].toLowerCase().includes(wanted) || picture.table[picture.ops[i]].toLowerCase().includes(wanted);
    // What can be seen in the picture comes first.
    const found = [...names.keys()].filter((i) => !wanted || fits(i)).sort((a, b) => (picture.box_of[a] < 0) - (picture.box_of[b] < 0));
    list.replaceChildren(...found.slice(0, LISTED).map((i) => {
      const box = picture.box_of[i];
      const label = `${picture.table[picture.ops[i]]}  ${names[i]}${box < 0 ? "  (shape or constant, not drawn)" : ""}`;
      return el("li", {}, el("button", { type: "button", disabled: box < 0, onclick: () => choose(box) }, label));
    }));
    if (wanted) new Set(found.map((i) => picture.box_of[i])).forEach((box) => boxNode(box)?.classList.add("hit"));
    told.textContent = wanted || found.length > LISTED
      ? `${count(found.length, "node")}${wanted ? " found" : ""}${found.length > LISTED ? `, the first ${LISTED} are listed` : ""}` : "";
  };

  const draw = async () => {
    try {
      const parsed = new DOMParser().parseFromString(await laidOut(dotOf(picture)), "image/svg+xml");
      const svg = document.importNode(parsed.documentElement, true);
      // Tooltips of Graphviz are the names of its own nodes.
      svg.querySelectorAll("title").forEach((node) => node.remove());
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", `${title}: ${picture.boxes.length} boxes`);
      pane.replaceChildren(svg);
      svg.addEventListener("click", (event) => {
        const node = event.target.closest(".node");
        if (node) choose(Number(node.id.slice(1)));
      });
      state.view = navigable(pane, svg);
      if (input.value) search(input.value);
    } catch (error) {
      pane.replaceChildren(el("p", { class: "message bad" }, `The picture cannot be laid out here (${error.message}); its nodes are listed below.`));
    }
  };

  const input = el("input", { type: "search", "aria-label": `find nodes in ${title}`, placeholder: "node or operator",
    oninput: () => search(input.value) });
  const button = (label, name, action) => el("button", { type: "button", "aria-label": name, onclick: () => state.view && action() }, label);
  const controls = el("div", { class: "controls" }, input,
    button("+", "zoom in", () => state.view.zoom(1 / ZOOM)), button("\u2212", "zoom out", () => state.view.zoom(ZOOM)),
    button("Fit", "fit", () => state.view.fit()));
  const grouped = picture.boxes.some(([, , number]) => number > 1);
  const said = [
    grouped ? "A box with \u00d7n stands for n nodes that do the same in every row or chunk; numbers at arrows count values." : "",
    hidden ? `${count(hidden, "node")} of shapes and constants ${hidden === 1 ? "is" : "are"} listed and not drawn.` : "",
    "Drag or arrow keys move, + and \u2212 zoom, and so does the wheel once the picture was clicked.",
  ];
  const inside = el("div", { class: "inside" }, el("p", { class: "soft" }, said.join(" ")), controls, pane, told, list);
  const drawn = `${(nodes - hidden).toLocaleString("en")} of ${count(nodes, "node")} drawn`;
  const summary = `${title}: ${drawn}, in ${picture.boxes.length.toLocaleString("en")} boxes with operands and results`;
  let opened = false;
  return el("details", { class: "picture", ontoggle: (event) => {
    if (opened || !event.target.open) return;
    opened = true;
    search("");
    draw();
  } }, el("summary", {}, summary), inside);
}
