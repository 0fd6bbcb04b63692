// Shows what the monitor tells, which is text already, as tiles, curves, a graph and tables.
"use strict";

const POLL_S = 3, TIMEOUT_S = 10, TYPING_MS = 300;
const $ = (id) => document.getElementById(id);
const state = { told: null, history: null, sort: "state", down: false, words: "", page: 0, num_asked: 0 };

function element(kind, text, className = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  made.className = className;
  return made;
}

// Replaces the content of an element if it differs from what was put there last.
function put(id, told, make) {
  const key = JSON.stringify(told);
  if ($(id).dataset.key === key) return;
  $(id).dataset.key = key;
  $(id).replaceChildren(...told.map(make));
}

const text = (id, value) => put(id, [value], (it) => it);

// Fills a table in place, so that a selection survives.
function fill(body, columns, rows) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach(({ cells, ...data }, index) => {
    const row = body.rows[index] || body.insertRow();
    Object.assign(row.dataset, data);
    row.title = data.peer || "";
    while (row.cells.length > cells.length) row.deleteCell(-1);
    cells.forEach((value, place) => {
      const cell = row.cells[place] || row.insertCell();
      cell.className = columns[place].classes;
      if (cell.textContent !== value) cell.textContent = value;
    });
  });
}

// Returns null if the monitor does not answer in time.
async function get(path) {
  try {
    const answer = await fetch(path, { signal: AbortSignal.timeout(1000 * TIMEOUT_S) });
    return answer.ok ? await answer.json() : null;
  } catch (error) {
    return null;
  }
}

// Reads the swarm, and the curves if there are others to show or a new sample is due.
async function look() {
  const asked = state.num_asked += 1;
  const query = new URLSearchParams({ sort: state.sort, words: state.words, page: state.page, ...(state.down && { descending: 1 }) });
  const told = await get(`api/page?${query}`);
  if (asked !== state.num_asked) return; // a later question counts
  if (!told) {
    $("link").className = "lost";
    text("link", `no connection to the monitor; showing data from ${state.told ? time(state.told.time_s) : "never"}`);
    return;
  }
  const isOther = JSON.stringify(told.curves) !== JSON.stringify(state.told?.curves);
  state.told = told;
  state.page = told.page;
  show(told);
  const due = state.history ? state.history.time_s.at(-1) + state.history.interval_s : 0;
  if (isOther || told.time_s >= due) await loadCurves(told.curves);
}

// The next poll begins POLL_S after this one has ended.
async function poll() {
  try {
    await look();
  } finally {
    setTimeout(poll, 1000 * POLL_S);
  }
}

const time = (seconds) => new Date(1000 * seconds).toLocaleTimeString();

function show(told) {
  $("link").className = "";
  text("link", `${time(told.time_s)}, live`);
  text("run", told.run);
  text("about", told.about);
  document.title = `${told.run} – noloco swarm`;
  const notices = told.notices.length ? told.notices : [{ level: "well", text: "All is well." }];
  put("notices", notices, (notice) => element("li", notice.text, notice.level));
  put("tiles", told.values, ({ name, text: value, details }) => {
    const tile = document.createElement("div");
    tile.append(element("dt", name), element("dd", value), element("dd", details, "sub"));
    return tile;
  });
  document.body.classList.toggle("staged", told.stages.length > 0);
  put("stage-head", told.stage_columns, ({ name, classes }) => Object.assign(element("th", name, classes), { scope: "col" }));
  fill($("stages"), told.stage_columns, told.stages);
  put("head", told.columns, heading);
  for (const cell of $("head").cells) {
    const isSorted = cell.textContent === state.sort;
    cell.ariaSort = isSorted ? (state.down ? "descending" : "ascending") : null;
  }
  fill($("rows"), told.columns, told.rows);
  text("shown", state.words ? `${told.num_rows} of ${told.graph.length} match` : `${told.num_rows} peers`);
  $("pages").hidden = told.num_pages === 1;
  text("page", `page ${told.page + 1} of ${told.num_pages}`);
  $("previous").disabled = told.page === 0;
  $("next").disabled = told.page === told.num_pages - 1;
  graph.draw(told.graph, told.meetings, told.time_s);
  if (told.stages.length) paths.draw(told.graph, told.stages.length);
}

function heading(column) {
  const cell = element("th", "", column.classes), button = element("button", column.name);
  cell.scope = "col";
  button.type = "button";
  button.onclick = () => { state.down = state.sort === column.name && !state.down; state.sort = column.name; look(); };
  cell.append(button);
  return cell;
}

async function loadCurves({ ids, has_range: hasRange, note }) {
  const h = await get(`api/history?${ids.map((id) => `id=${encodeURIComponent(id)}`).join("&")}`);
  if (!h) return;
  state.history = h;
  const t = h.time_s, line = (label, stroke, more) => ({ label, stroke, width: 1.5, ...more });
  const percent = (curve) => curve.map((n) => n === null ? null : 100 * n);
  const range = [line("lowest", "--faint"), line("mean", "--blue", { width: 2 }), line("highest", "--faint")];
  const names = Object.keys(h.losses), bounds = hasRange ? [h.loss_lowest, h.loss, h.loss_highest] : [];
  const labels = new Map(state.told.graph.map(({ id, label }) => [id, label]));
  const own = names.map((name, index) => line(labels.get(name) ?? name.slice(-6), listColour(index)));
  charts.loss.set([...(hasRange ? range : []), ...own], [t, ...bounds, ...names.map((name) => h.losses[name])]);
  charts.speed.set([line("tokens/s", "--blue")], [t, h.tokens_per_s]);
  charts.apart.set(range, [t, ...[h.apart_lowest, h.apart, h.apart_highest].map(percent)]);
  charts.swaps.set([line("swaps", "--blue")], [t, h.swaps_per_min]);
  charts.link.set([line("in use", "--blue")], [t, percent(h.link_use)]);
  text("n-loss", note);
  legend("l-loss", [...(hasRange ? range : []), ...own]);
  legend("l-apart", range);
}

function legend(id, series) {
  put(id, series, ({ label, stroke }) => {
    const entry = element("span", label), mark = element("i", "");
    mark.style.borderColor = stroke.startsWith("--") ? `var(${stroke})` : stroke;
    entry.prepend(mark);
    return entry;
  });
}

const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const charts = Object.fromEntries(["loss", "speed", "apart", "swaps", "link"].map((name) => [name, new Chart(`c-${name}`, (n) => short.format(n))]));
const graph = new Graph("graph"), paths = new Paths("paths");
let typing;
$("search").oninput = (event) => {
  state.words = event.target.value.trim();
  state.page = 0;
  clearTimeout(typing);
  typing = setTimeout(look, TYPING_MS);
};
$("previous").onclick = () => { state.page -= 1; look(); };
$("next").onclick = () => { state.page += 1; look(); };
poll();
