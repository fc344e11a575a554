"use strict";
// A site: one line, and all that is known of it once the line is opened.

function siteLine(line, index, fill) {
  const part = (text, kind) => (text ? el("span", { class: kind }, text) : null);
  const summary = el("summary", {},
    part(line.name, "path"), part(line.status, `status ${line.status.replace(" ", "-")}`), part(line.op, "path"),
    part([line.rule, line.form].filter(Boolean).join(", "), "soft"), part(line.op && line.nodes ? becomes(line.nodes, line.added) : count(line.nodes || line.added, "node"), "soft"),
    line.reason ? el("code", {}, line.reason) : null);
  const site = el("details", { class: "site", id: `site-${index}`, ontoggle: () => {
    if (!site.open || site.dataset.filled) return;
    site.dataset.filled = "yes";
    fill(site, index);
  } }, summary);
  return site;
}

/** How many nodes a site has, and how many come in its place. */
function becomes(nodes, added) {
  return `${count(nodes, "node")} become${nodes === 1 ? "s" : ""} ${added.toLocaleString("en")}`;
}

/** The sections of one site. */
function siteInside(site, pictures) {
  return el("div", { class: "inside" },
    ...why(site), ...looked(site), ...roles(site), ...rule(site), ...proof(site), ...target(site), ...held(site), ...notes(site), ...drawn(site, pictures));
}

function why(site) {
  if (!site.reason) return [];
  const near = site.status === "near-miss";
  const parts = [el("h3", {}, near ? "Why not" : "Why it is left"), el("p", {}, el("code", {}, site.reason.code), " ", ...coded(site.reason.text))];
  if (site.nearest) parts.push(...nearest(site.nearest));
  return [el("div", { class: `why${site.status === "refused" ? " refusal" : ""}` }, ...parts)];
}

/** A text with what stands between backticks as code. */
function coded(text) {
  return text.split("`").map((part, index) => (index % 2 ? el("code", {}, part) : part));
}

/** How far the site is from the rule and from its neighbours. */
function nearest(found) {
  const said = `${found.said[0].toUpperCase()}${found.said.slice(1)}.`;
  return [el("p", {}, `${said} Smallest relative differences over ${count(found.tokens, "token")}, at the best of the likely readings of the inputs:`),
    table(["compared with", "what it is", "difference", "from 1e-16 to 1, by powers of ten"], found.differences.map(compared), [0])];
}

/** A row of what a near miss was compared with; the smallest difference stands out. */
function compared([name, text, error], place) {
  const strong = (content) => (place ? content : el("strong", {}, content));
  const width = error === null ? 100 : Math.min(100, Math.max(1, 100 * (1 + Math.log10(Math.max(error, 1e-16)) / 16)));
  const track = el("div", { class: "track", "aria-hidden": "true" }, el("span", { class: "bar now", style: `width: ${width.toFixed(1)}%` }));
  return [strong(name), strong(text), strong(sci(error)), track];
}

function looked(site) {
  return site.looked ? [el("h3", {}, "What was looked at"), table(["", "tensor", "type"], site.looked, [1, 2])] : [];
}

function roles(site) {
  if (!site.operands) return [];
  const row = ([name, role]) => [name, role.value, role.layout ?? "", `[${role.shape.join(", ")}]`, role.dtype];
  return [el("h3", {}, "Roles"), table(["role", "tensor", "layout", "shape", "type"], [...site.operands, ...site.results].map(row), [1, 2, 3])];
}

function rule(site) {
  if (!site.rule) return [];
  const rows = [["rule", `${site.rule}, written as ${site.form}`]];
  const dims = site.dims;
  if (dims) rows.push(["dims", `batch ${dims.batch}, tokens ${dims.tokens}, heads ${dims.key_heads} (key) / ${dims.value_heads} (value), head size ${dims.key_dim} (key) / ${dims.value_dim} (value)`]);
  if (site.scale !== null) rows.push(["scale", String(Number(site.scale.toPrecision(6)))]);
  if (site.norms) rows.push(["L2 norm", site.norms.map(([name, kind, eps]) => `${name}: ${kind}, eps ${Number(eps.toPrecision(6))}`).join("; ") || "none"]);
  const valid = site.valid_tokens;
  if (valid) {
    const ends = [valid.below ? `${valid.below} below` : "", valid.above ? `${valid.above} above` : ""].filter(Boolean);
    rows.push(["valid tokens", `${[...new Set(valid.proven)].join(" to ")}${ends.length ? `; ${ends.join(", ")}` : ""}; tried ${valid.tried.join(", ")}`]);
  }
  if (site.parameters) rows.push(["parameters", Object.entries(site.parameters).map(([name, value]) => `${name} = ${value}`).join(", ") || "none"]);
  return [el("h3", {}, "Rule"), facts(rows),
    ...(site.recurrence ? [el("p", { class: "soft" }, "In its own names:"), el("pre", { class: "path" }, site.recurrence)] : [])];
}

function proof(site) {
  if (!site.proof) return [];
  const shared = site.proof.shared_with;
  return [el("h3", {}, "Proof"), facts([
    ["equal to the rule", `${sci(site.proof.max_error)} relative, in ${site.proof.precision}, over ${count(site.proof.draws, "draw")}`],
    ["what is written", site.proof.emitted_error === null ? "not proven: nothing is to be written" : `${sci(site.proof.emitted_error)} relative, against the nodes it replaces`],
    ...(shared ? [["shared with", `${shared}: equal up to names`]] : []),
  ])];
}

function target(site) {
  const emitted = site.emitted;
  if (!emitted || !("casts" in emitted)) return [];
  if (!emitted.node) return [el("h3", {}, "Target node"), el("p", {}, emitted.nodes ? `${emitted.op}, ${count(emitted.nodes, "node")}` : "nothing: readers read what was copied")];
  const ports = [...emitted.inputs.map((port) => ["input", ...port]), ...emitted.outputs.map((port) => ["output", ...port])]
    .map(([kind, port, name, type]) => [kind, port, name || "(absent)", type]);
  return [el("h3", {}, "Target node"),
    facts([["node", el("span", { class: "path" }, emitted.node)], ["operator", `${emitted.type} (${emitted.domain})`], ["nodes", `${becomes(site.nodes, site.nodes_added)}, the operator and what is around it`]]),
    table(["", "port", "tensor", "type"], ports, [2, 3]),
    emitted.attributes.length ? table(["attribute", "value"], emitted.attributes, [0, 1]) : null,
    emitted.casts.length ? table(["cast", "to", "gives"], emitted.casts.map(([from, to, type]) => [from, type, to]), [0, 2]) : el("p", { class: "soft" }, "No casts."),
    site.pins.length ? table(["pinned tensor", "axis", "size"], site.pins.map((pin) => pin.map(String)), [0]) : null,
  ].filter(Boolean);
}

/** The node that an earlier run put in a site's place, and what the file's record tells of that. */
function held(site) {
  const node = site.held;
  if (!node) return [];
  const replaced = Object.entries(node.replaced).map(([op, number]) => `${number.toLocaleString("en")} ${op}`).join(", ");
  const ports = [...node.inputs.map((port) => ["input", port]), ...node.outputs.map((port) => ["output", port])]
    .map(([kind, port]) => [kind, port.name, port.tensor, port.type]);
  return [el("h3", {}, "Fused before this run"),
    facts([["node", el("span", { class: "path" }, node.node)], ["operator", `${site.op} (${node.domain || "ai.onnx"})`],
      ["replaced", replaced || "not known: there is no rollback record"],
      ["rounded", node.rounded.map(({ operand, was, now }) => `${operand} from ${was} to ${now}`).join(", ") || "nothing"]]),
    table(["", "port", "tensor", "type"], ports, [2, 3]),
    Object.keys(node.attributes).length ? table(["attribute", "value"], Object.entries(node.attributes), [0, 1]) : null,
  ].filter(Boolean);
}

function notes(site) {
  return site.notes.length ? [el("h3", {}, "Notes"), ...site.notes.map((note) => el("p", {}, ...coded(note)))] : [];
}

function drawn(site, pictures) {
  const views = [[site.op ? "Before" : "As it is", site.before], ["After", site.after]].filter(([, use]) => use);
  if (!views.length) return [];
  const said = site.op ? "Before shows its nodes, from its operands to its results, and those that read sizes for them. What others read of these stays in the file; what is there for them alone goes with them." : "";
  return [el("h3", {}, "Graph"), said ? el("p", { class: "soft" }, said) : null, ...views.flatMap(([title, use]) => {
    const picture = pictures[use.picture];
    const said = use.foreign ? [el("p", { class: "soft" }, `Names are those of ${picture.site}, whose graph is the same.`)] : [];
    return [...said, pictureView(`${title} (${site.name})`, picture, namesFor(picture, use))];
  })].filter(Boolean);
}

/** What the nodes of a picture are called in one of the sites that look like it. */
function namesFor(picture, use) {
  if (use.foreign) return picture.names;
  const [from, to] = use.swap ?? ["", ""];
  const pattern = from ? new RegExp(`${from.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}(?!\\d)`, "g") : null;
  return picture.names.map((name, i) => use.names?.[i] ?? (pattern ? name.replace(pattern, () => to) : name));
}
