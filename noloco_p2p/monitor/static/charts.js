// Draws the curves and the swap graph. The theme colours come from the style sheet.
"use strict";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Steps of the golden angle give neighbours in a list very different colours.
function listColour(index) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return `hsl(${(210 + 137.5 * index) % 360} 62% ${dark ? 65 : 42}%)`;
}

// Formats ticks as times of day, or as days if the curve is long.
function clock(ticks) {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : 60;
  const time = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  const parts = step >= 43200 ? { month: "short", day: "numeric" } : step < 60 ? { ...time, second: "2-digit" } : time;
  return ticks.map((tick) => new Date(1000 * tick).toLocaleString([], parts));
}

class Chart {
  constructor(id, format) {
    this.place = document.getElementById(id);
    this.format = format;
    this.series = [];
    this.data = [[]];
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(this.place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  size() { return { width: Math.max(200, this.place.clientWidth), height: 205 }; }

  // series: [{label, stroke (name of a variable or a colour), width, dash}]; data: [times, values, ...].
  set(series, data) {
    const same = this.plot && JSON.stringify(series) === JSON.stringify(this.series);
    this.series = series;
    this.data = data;
    if (same) this.plot.setData(data);
    else this.draw();
  }

  draw() {
    if (this.plot) this.plot.destroy();
    const grid = { stroke: colour("--rule"), width: 1 };
    const axis = { stroke: colour("--soft"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
    this.plot = new uPlot({
      ...this.size(),
      cursor: { y: false, points: { show: this.series.length < 8 } },
      legend: { show: false },
      padding: [null, 26, null, null], // space for half of the last label
      axes: [{ ...axis, values: (_, ticks) => clock(ticks), space: 70, size: 32 }, { ...axis, size: 58, values: (_, ticks) => ticks.map(this.format) }],
      series: [{}, ...this.series.map((one) => ({
        ...one, stroke: one.stroke.startsWith("--") ? colour(one.stroke) : one.stroke, spanGaps: true,
        points: { show: false },
      }))],
    }, this.data, this.place);
  }
}

// A canvas that is redrawn when its size changes. Subclasses implement `paint(pen, width, height, ...what)`.
class Drawing {
  constructor(id) {
    this.canvas = document.getElementById(id);
    new ResizeObserver(() => this.last && this.draw(...this.last)).observe(this.canvas);
  }

  draw(...what) {
    this.last = what;
    const scale = devicePixelRatio || 1, width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px ui-monospace, monospace";
    this.fill = { alive: colour("--green"), silent: colour("--amber"), leaving: colour("--blue"), other: colour("--faint") };
    this.paint(pen, width, height, ...what);
  }

  dot(pen, peer, x, y, size) {
    pen.fillStyle = this.fill[peer.health] || this.fill.other;
    pen.beginPath();
    pen.arc(x, y, size, 0, 7);
    pen.fill();
    if (!peer.is_own) return;
    pen.strokeStyle = colour("--ink");
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(x, y, size + 3, 0, 7);
    pen.stroke();
  }

  // Writes the name of a peer, or the end of its id, and shortens it to the space if that is too long.
  write(pen, peer, x, y, space) {
    let label = peer.label;
    while (label.length > 1 && pen.measureText(label).width > space) label = `${label.slice(0, -2)}…`;
    pen.fillText(label, x, y);
  }
}

// Draws the peers on a circle in the order of their ids, and a chord from each to its last partners, which fades in two minutes.
class Graph extends Drawing {
  // peers: [{id, label, health, is_own}]; meetings: [[at_s, peer, partner]]
  paint(pen, width, height, peers, meetings, now) {
    const isFew = peers.length <= 24, radius = Math.max(20, Math.min(width, height) / 2 - (isFew ? 26 : 8));
    const place = new Map(peers.map((peer, index) => {
      const angle = 2 * Math.PI * index / peers.length - Math.PI / 2;
      return [peer.id, [width / 2 + radius * Math.cos(angle), height / 2 + radius * Math.sin(angle), angle]];
    }));
    pen.strokeStyle = colour("--blue");
    for (const [at, peer, partner] of meetings) {
      const from = place.get(peer), to = place.get(partner);
      if (!from || !to) continue;
      pen.globalAlpha = Math.max(0.06, 1 - (now - at) / 120) * (peers.length > 200 ? 0.4 : 0.9);
      pen.lineWidth = peers.length > 200 ? 0.6 : 1.5;
      pen.beginPath();
      pen.moveTo(from[0], from[1]);
      pen.quadraticCurveTo(width / 2, height / 2, to[0], to[1]);
      pen.stroke();
    }
    pen.globalAlpha = 1;
    const size = peers.length > 200 ? 1.2 : peers.length > 24 ? 3 : 6, ink = colour("--soft");
    for (const peer of peers) {
      const [x, y, angle] = place.get(peer.id);
      this.dot(pen, peer, x, y, size);
      if (isFew) {
        pen.fillStyle = ink;
        pen.textAlign = Math.cos(angle) < -0.1 ? "right" : Math.cos(angle) > 0.1 ? "left" : "center";
        const space = pen.textAlign === "center" ? width : pen.textAlign === "left" ? width - x - 13 : x - 13;
        this.write(pen, peer, x + 13 * Math.cos(angle), y + 15 * Math.sin(angle) + 4, space);
      }
    }
    this.canvas.setAttribute("aria-label", `Swap graph: ${peers.length} peers and their last ${meetings.length} partners`);
  }
}

// Draws a column of peers for each stage, the heads again on the right, where each path ends, and a line from each peer
// to each peer of the next column to which it sends.
class Paths extends Drawing {
  // peers: [{id, label, health, is_own, stage, sends_to (ends of ids)}]
  paint(pen, width, height, peers, numStages) {
    const top = 34, living = peers.filter((peer) => peer.health === "alive" || peer.health === "silent");
    const stages = Array.from({ length: numStages }, (_, stage) => living.filter((peer) => peer.stage === stage));
    const columns = numStages ? [...stages, stages[0]] : [];
    const most = Math.max(1, ...stages.map((stage) => stage.length));
    const x = (column) => 40 + (width - 80) * column / numStages;
    const y = (column, index) => top + (height - top - 20) * (index + 0.5) / columns[column].length;
    pen.strokeStyle = colour("--blue");
    pen.lineWidth = most > 24 ? 0.6 : 1.5;
    pen.globalAlpha = most > 24 ? 0.4 : 0.7;
    for (let column = 0; column < numStages; column += 1) {
      const ends = new Map(columns[column + 1].map((peer, index) => [peer.id.slice(-6), index]));
      columns[column].forEach((peer, index) => peer.sends_to.filter((end) => ends.has(end)).forEach((end) => {
        pen.beginPath();
        pen.moveTo(x(column), y(column, index));
        pen.lineTo(x(column + 1), y(column + 1, ends.get(end)));
        pen.stroke();
      }));
    }
    pen.globalAlpha = 1;
    const space = (width - 80) / numStages, outer = Math.min(space, 40 + space / 2);
    columns.forEach((column, place) => {
      const stage = place % numStages, ink = colour("--soft"), edge = place === 0 ? 0 : place === numStages ? width : null;
      pen.textAlign = "center";
      pen.fillStyle = column.length ? ink : colour("--red");
      pen.fillText(stage ? `stage ${stage}` : "head", x(place), 12);
      if (!column.length) pen.fillText("empty", x(place), height / 2);
      column.forEach((peer, index) => {
        this.dot(pen, peer, x(place), y(place, index), most > 24 ? 2 : 6);
        pen.fillStyle = ink;
        if (most > 6) return;
        if (edge !== null) pen.textAlign = edge ? "right" : "left"; // else the edge would cut a long name
        this.write(pen, peer, edge ?? x(place), y(place, index) + 20, edge === null ? space : outer);
      });
    });
    this.canvas.setAttribute("aria-label", `Paths: ${living.length} peers in ${numStages} stages`);
  }
}
