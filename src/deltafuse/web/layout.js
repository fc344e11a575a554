"use strict";
// Runs in a worker, behind Viz.js: lays out one graph after the other.
let instance;

onmessage = async ({ data }) => {
  try {
    instance ??= Viz.instance();
    const viz = await instance;
    postMessage({ id: data.id, svg: viz.renderString(data.dot, { format: "svg", engine: "dot" }) });
  } catch (error) {
    postMessage({ id: data.id, error: String(error) });
  }
};
