// A heat map of ranks by windows: one pixel a cell, drawn from one byte a cell.
"use strict";
(() => {
  const box = document.getElementById("heat-map");
  if (!box || !box.dataset.src) return;
  const says = document.getElementById("heat-says");
  // Blue to yellow (cividis): the same order for every eye, and in grey.
  const STOPS = [[0, 32, 77], [49, 68, 107], [102, 105, 112], [149, 143, 120], [201, 185, 95], [255, 234, 70]];
  const COLOURS = new Uint32Array(256);
  for (let i = 1; i < 256; i++) {
    const at = ((i - 1) / 254) * (STOPS.length - 1), low = Math.min(Math.floor(at), STOPS.length - 2), f = at - low;
    const [r, g, b] = STOPS[low].map((v, c) => Math.round(v + (STOPS[low + 1][c] - v) * f));
    COLOURS[i] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  let header, cells, columns, rows, canvas, at = null;

  function three(value) { return value < 999.5 ? value.toPrecision(3) : value.toFixed(0); }
  function seconds(value) {
    if (header.measure === "ratio" || header.measure === "cpu" || header.measure === "runnable") return three(value);
    return value < 0.9995 ? `${three(value * 1000)} ms` : `${three(value)} s`;
  }
  function value(row, column) {
    const byte = cells[row * columns + column];
    return byte ? header.low + ((byte - 1) / 254) * (header.high - header.low) : null;
  }
  function node(row) {
    let left = row;
    for (const [name, length] of header.nodes) { if (left < length) return name; left -= length; }
    return "";
  }
  function draw() {
    // Wide screens show ranks from the top down and windows across.
    canvas.width = columns; canvas.height = rows;
    canvas.style.height = `${Math.min(Math.max(rows * (rows > 512 ? 0.06 : rows > 64 ? 2 : 14), 160), 620)}px`;
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < cells.length; i++) pixels[i] = cells[i] ? COLOURS[cells[i]] : 0;  // the page shows through
    context.putImageData(image, 0, 0);
    const key = document.getElementById("heat-key").getContext("2d");
    const strip = key.createImageData(256, 10), line = new Uint32Array(strip.data.buffer);
    for (let i = 0; i < line.length; i++) line[i] = COLOURS[Math.max(1, i % 256)];
    key.putImageData(strip, 0, 0);
    document.getElementById("heat-low").textContent = `${seconds(header.low)} and less`;
    document.getElementById("heat-high").textContent = `${seconds(header.high)} and more`;
  }
  function mark() {
    // Beside the row of each rank that was found to be slow.
    for (const [rank, state] of header.found) {
      const row = header.ranks.indexOf(rank);
      if (row < 0) continue;
      const link = document.createElement("a");
      link.className = state === "open" ? "found open" : "found";
      link.href = box.dataset.href + rank;
      link.textContent = `▲ ${rank}`;
      link.title = `Rank ${rank} was found to be slow: ${state}`;
      link.style.top = `${((row + 0.5) / rows) * 100}%`;
      box.append(link);
    }
  }
  function tell() {
    const [row, column] = at;
    const [first, last] = header.windows[column];
    const found = value(row, column);
    const when = header.is_by_time ? new Date(first * 1000).toLocaleTimeString() : `steps ${first}–${last}`;
    says.textContent = `Rank ${header.ranks[row]} on ${node(row)}, ${when}: ${found === null ? "not known" : seconds(found)}`;
  }
  function table() {
    const wide = document.querySelector("#heat-table .wide");
    const last = columns - 1;
    const order = [...Array(rows).keys()].filter((row) => cells[row * columns + last]).sort((a, b) => cells[b * columns + last] - cells[a * columns + last]).slice(0, 50);
    const made = document.createElement("table");
    const head = made.createTHead().insertRow();
    for (const text of ["Rank", "Node", "Newest window", "First window"]) { const th = document.createElement("th"); th.scope = "col"; th.textContent = text; head.append(th); }
    const body = made.createTBody();
    for (const row of order) {
      const line = body.insertRow();
      const link = document.createElement("a");
      link.href = box.dataset.href + header.ranks[row]; link.textContent = header.ranks[row];
      line.insertCell().append(link);
      const first = value(row, 0);
      for (const text of [node(row), seconds(value(row, last)), first === null ? "—" : seconds(first)]) line.insertCell().textContent = text;
    }
    wide.replaceChildren(made);
  }
  function place(event) {
    const frame = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - frame.left) / frame.width) * columns);
    const row = Math.floor(((event.clientY - frame.top) / frame.height) * rows);
    at = [Math.min(rows - 1, Math.max(0, row)), Math.min(columns - 1, Math.max(0, column))];
    tell();
  }
  async function load() {
    const answer = await fetch(box.dataset.src, { credentials: "same-origin" });
    if (answer.status === 204) { box.textContent = "No timings are known now."; return; }
    if (!answer.ok) { says.textContent = await answer.text(); box.textContent = ""; return; }
    const buffer = await answer.arrayBuffer();
    const length = new DataView(buffer).getUint32(0, true);
    header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    cells = new Uint8Array(buffer, 4 + length);
    columns = header.windows.length; rows = header.ranks.length;
    if (!rows || !columns) { box.textContent = "No timings are known now."; return; }
    canvas = document.createElement("canvas");
    canvas.setAttribute("aria-hidden", "true");
    box.replaceChildren(canvas);
    draw(); mark(); table();
    says.textContent = `${rows.toLocaleString("en")} ranks × ${columns} windows. Point at a cell, or use the arrow keys.`;
    performance.mark("heat-drawn");
    box.dataset.drawn = "1";
    canvas.addEventListener("pointermove", place);
    canvas.addEventListener("click", (event) => { place(event); open(); });
  }
  function open() { if (at) location.href = box.dataset.href + header.ranks[at[0]]; }
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-50, 0], PageDown: [50, 0] };
    if (event.key === "Enter") { open(); return; }
    const move = moves[event.key];
    if (!move || !header) return;
    event.preventDefault();
    at = at || [0, columns - 1];
    at = [Math.min(rows - 1, Math.max(0, at[0] + move[0])), Math.min(columns - 1, Math.max(0, at[1] + move[1]))];
    tell();
  });
  load().catch(() => { says.textContent = "The picture cannot be loaded now."; });
})();
