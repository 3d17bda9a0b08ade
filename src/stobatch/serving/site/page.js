"use strict";
// The page at /: a picture, its certified label, and what changes within a radius can and cannot do.

const $ = (id) => document.getElementById(id);
const state = { card: null, model: null, token: null, picture: null, answer: null, turn: 0, attackTurn: 0, moved: false };

// ---- the server ----

async function ask(path, body) {
  const headers = { "content-type": "application/json" };
  if (state.token) headers.authorization = `Bearer ${state.token}`;
  const options = body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers };
  const answer = await fetch(path, options);
  if (answer.status === 401) {
    $("token-form").hidden = false;
    $("token").focus();
  }
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

const request = (picture, parameters) => ({
  inputs: [{ name: "pictures", datatype: "FP32", shape: [1, ...state.model.input_shape], data: Array.from(picture) }],
  parameters,
});
const column = (answer, name) => answer.outputs.find((one) => one.name === name);
const address = (verb) => `/v2/models/${encodeURIComponent($("model").value)}/${verb}`;

// ---- models and their card ----

async function start() {
  try {
    state.card = (await ask("/card")).models;
  } catch (error) {
    say("meaning", error.message);
    return;
  }
  $("token-form").hidden = true;
  $("model").replaceChildren(...Object.keys(state.card).map((name) => new Option(name, name)));
  choose();
}

function choose() {
  state.model = state.card[$("model").value];
  $("digest").textContent = `weights ${state.model.weights_sha256.slice(0, 12)}`;
  $("warning").hidden = !state.model.warning;
  $("warning").textContent = state.model.warning || "";
  const [, height, width] = state.model.input_shape;
  for (const id of ["own", "random", "worst"]) Object.assign($(id), { width, height });
  showCard();
  changed();
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function showCard() {
  const { privacy, certificates, method } = state.model;
  const list = document.createElement("dl");
  const add = (term, ...details) => list.append(element("dt", term), ...details);
  add("Training data", element("dd", privacy.status, `status ${privacy.status}`), element("dd", privacy.line), element("dd", privacy.meaning, "muted"));
  for (const line of privacy.objections) list.append(element("dd", `against it: ${line}`));
  for (const kind of certificates) {
    const often = kind.failure_probability ? `; each wrong with probability at most ${kind.failure_probability}` : "";
    add(`Radius “${kind.name}”`, element("dd", kind.status, `status ${kind.status}`),
      element("dd", `${kind.norm} over ${kind.input_range}, of the ${kind.function.replaceAll("_", " ")}${often}`), element("dd", kind.source, "muted"));
    for (const line of kind.assumptions) list.append(element("dd", `assumes: ${line}`, "muted"));
  }
  if (!certificates.length) add("Radius", element("dd", "this model has no certificate"));
  add("Method", element("dd", method));
  $("card").replaceChildren(list);
}

// ---- drawing ----

const board = $("draw");
const pen = board.getContext("2d", { willReadFrequently: true });
const keyboard = { x: 140, y: 140, down: false };
let last = null;

function clear() {
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, board.width, board.height);
  last = null;
}

function stroke(x, y) {
  pen.strokeStyle = pen.fillStyle = "#fff";
  pen.lineWidth = 22;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  const from = last || [x, y];
  pen.moveTo(from[0], from[1]);
  pen.lineTo(x + 0.01, y);
  pen.stroke();
  last = [x, y];
}

function place(event) {
  const box = board.getBoundingClientRect();
  return [((event.clientX - box.left) * board.width) / box.width, ((event.clientY - box.top) * board.height) / box.height];
}

board.addEventListener("pointerdown", (event) => {
  board.setPointerCapture(event.pointerId);
  last = null;
  stroke(...place(event));
});
board.addEventListener("pointermove", (event) => {
  if (event.buttons && last) stroke(...place(event));
});
for (const name of ["pointerup", "pointercancel"]) {
  board.addEventListener(name, () => {
    last = null;
    changed();
  });
}
board.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: [-10, 0], ArrowRight: [10, 0], ArrowUp: [0, -10], ArrowDown: [0, 10] };
  if (event.key in moves) {
    const [dx, dy] = moves[event.key];
    keyboard.x = Math.min(board.width, Math.max(0, keyboard.x + dx));
    keyboard.y = Math.min(board.height, Math.max(0, keyboard.y + dy));
    if (keyboard.down) stroke(keyboard.x, keyboard.y);
  } else if (event.key === " ") {
    keyboard.down = !keyboard.down;
    last = null;
    if (keyboard.down) stroke(keyboard.x, keyboard.y);
    else changed();
  } else if (event.key === "Delete" || event.key === "Backspace") {
    clear();
    changed();
  } else return;
  event.preventDefault();
  const where = `${Math.round((100 * keyboard.x) / board.width)}% across, ${Math.round((100 * keyboard.y) / board.height)}% down`;
  say("pen-state", `pen ${keyboard.down ? "down" : "up"}, ${where}`);
});

async function take(file) {
  if (!file) return;
  try {
    const image = await createImageBitmap(file);
    clear();
    const scale = Math.min(board.width / image.width, board.height / image.height);
    const [width, height] = [image.width * scale, image.height * scale];
    pen.drawImage(image, (board.width - width) / 2, (board.height - height) / 2, width, height);
    changed();
  } catch {
    say("meaning", "This file is no picture that the browser can read.");
  }
}

$("file").addEventListener("change", (event) => take(event.target.files[0]));
board.addEventListener("dragover", (event) => {
  event.preventDefault();
  board.classList.add("over");
});
board.addEventListener("dragleave", () => board.classList.remove("over"));
board.addEventListener("drop", (event) => {
  event.preventDefault();
  board.classList.remove("over");
  take(event.dataTransfer.files[0]);
});
$("clear").addEventListener("click", () => {
  clear();
  changed();
});

// ---- from the board to the network's picture ----

function read() {
  const [channels, height, width] = state.model.input_shape;
  const pixels = pen.getImageData(0, 0, board.width, board.height).data;
  const [stepX, stepY] = [board.width / width, board.height / height];
  const values = new Float32Array(channels * height * width);
  let ink = false;
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const sums = [0, 0, 0];
      let count = 0;
      for (let v = Math.floor(y * stepY); v < Math.max((y + 1) * stepY, y * stepY + 1) && v < board.height; v++) {
        for (let u = Math.floor(x * stepX); u < Math.max((x + 1) * stepX, x * stepX + 1) && u < board.width; u++) {
          for (let c = 0; c < 3; c++) sums[c] += pixels[4 * (v * board.width + u) + c];
          count++;
        }
      }
      const grey = (sums[0] + sums[1] + sums[2]) / (3 * count);
      ink = ink || grey > 0;
      for (let c = 0; c < channels; c++) {
        const byte = Math.round(channels === 1 ? grey : sums[c] / count);
        values[(c * height + y) * width + x] = byte / 127.5 - 1;
      }
    }
  }
  return ink ? values : null;
}

function paint(id, values) {
  const [channels, height, width] = state.model.input_shape;
  const context = $(id).getContext("2d");
  const image = context.createImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    for (let c = 0; c < 3; c++) {
      image.data[4 * i + c] = values ? (values[(channels === 1 ? 0 : c) * width * height + i] + 1) * 127.5 : 0;
    }
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

// ---- the answer ----

const say = (id, text) => ($(id).textContent = text);

const SOON_MS = 300;

async function changed() {
  if (!state.model) return;
  const turn = ++state.turn;
  state.attackTurn++;
  state.picture = read();
  state.answer = null;
  paint("own", state.picture);
  paint("random", null);
  if (!state.picture) {
    for (const id of ["kinds", "scores"]) $(id).replaceChildren();
    say("label", "–");
    say("meaning", "Nothing is drawn yet.");
    showRuler();
    return;
  }
  say("meaning", "working…");
  perturb();
  try {
    // What is proved after a moment is shown at once; then the rest.
    for (const deadline_ms of [SOON_MS, 20000]) {
      const answer = await ask(address("infer"), request(state.picture, { deadline_ms }));
      if (turn !== state.turn) return;
      const more = answer.parameters.deadline_reached && deadline_ms === SOON_MS;
      if (!more) state.answer = answer;
      if (!more || !column(answer, "abstains").data[0]) showAnswer(answer, more);
      if (!more) break;
    }
    perturb();
  } catch (error) {
    if (turn === state.turn) say("meaning", error.message);
  }
}

const certified = (answer = state.answer) => {
  const radius = answer && column(answer, "radius");
  return radius ? { size: radius.data[0], ...radius.parameters } : null;
};
const often = (kind) => (kind.failure_probability ? `, wrong with probability at most ${kind.failure_probability}` : "");

function showAnswer(answer, more) {
  const held = certified(answer);
  const abstains = column(answer, "abstains").data[0];
  say("label", abstains ? "abstains" : column(answer, "class_name").data[0]);
  const ran = more ? " Looking further…" : " Time ran out; this is what is proved by then.";
  const late = answer.parameters.deadline_reached ? ran : "";
  if (abstains) say("meaning", `No label could be proved.${late}`);
  else if (!held) say("meaning", answer.parameters.meaning);
  else if (!held.size) say("meaning", `This label, and no radius: nothing is proved about changes.${late}`);
  else {
    const of255 = ((held.size * 255) / 2).toPrecision(3);
    const verb = `${held.status === "proved" ? "Proved" : `Only ${held.status}, NOT proved`}: no change up to`;
    say("meaning", `${verb} ${held.size.toPrecision(4)} (${held.norm} over ${held.input_range}; ${of255} of 255) alters this label${often(held)}.${late}`);
  }
  const kinds = answer.outputs.filter((one) => one.name.startsWith("radius") && one.name !== "radius_of_255");
  const several = kinds.filter((one) => one.name !== "radius"); // one alone is in the sentence above
  $("kinds").replaceChildren(...several.map((one) => {
    const item = element("li", `${one.parameters.kind}: ${one.data[0] ? `${one.data[0].toPrecision(4)} ${one.parameters.norm}` : "no radius"} `);
    item.append(element("span", one.parameters.status, `status ${one.parameters.status}`));
    return item;
  }));
  const scores = column(answer, "scores").data;
  const top = Math.max(...scores);
  const shares = scores.map((score) => Math.exp(score - top));
  const sum = shares.reduce((a, b) => a + b, 0);
  const rows = shares.map((share, label) => [share / sum, state.model.class_names[label] ?? String(label)]);
  rows.sort((a, b) => b[0] - a[0]);
  $("scores").replaceChildren(...rows.slice(0, 5).map(([share, name]) => {
    const item = document.createElement("li");
    const meter = document.createElement("meter");
    meter.value = share;
    meter.setAttribute("aria-label", name);
    item.append(element("span", name), meter, element("span", `${Math.round(100 * share)}%`));
    return item;
  }));
  const end = Math.max(0.5, 2 * (held ? held.size : 0));
  $("radius").max = end.toFixed(2);
  // Until somebody moves it, the slider stands where the proof ends.
  const stands = state.moved ? Number($("radius").value) : Math.floor(100 * (held ? held.size : 0)) / 100;
  $("radius").value = Math.min(stands, end);
  showRuler(answer);
}

function showRuler(answer = state.answer) {
  const held = certified(answer);
  const end = Number($("radius").max);
  const asked = Number($("radius").value);
  const bar = $("ruler-proved");
  bar.className = held ? held.status : "";
  bar.style.width = held ? `${Math.min(100, (100 * held.size) / end)}%` : "0";
  say("ruler-proved", held && held.size / end > 0.2 ? held.status : "");
  $("ruler-asked").style.left = `calc(${Math.min(100, (100 * asked) / end)}% - 1px)`;
  $("ticks").replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((part) => element("span", part ? (part * end).toFixed(2) : "0")));
  const told = held ? `${held.status} up to ${held.size.toPrecision(3)} ${held.norm}` : "no certificate";
  $("ruler").setAttribute("aria-label", `Ruler from 0 to ${end.toFixed(2)}: ${told}; the slider stands at ${asked.toFixed(2)}`);
  say("radius-value", held ? `${asked.toFixed(2)} (${held.norm}; ${((asked * 255) / 2).toPrecision(3)} of 255)` : asked.toFixed(2));
}

// ---- changes within the radius ----

function randomChange(size, norm) {
  const noise = state.picture.map(() => (norm === "linf" ? Math.sign(Math.random() - 0.5) : Math.random() + Math.random() + Math.random() - 1.5));
  const length = norm === "linf" ? 1 : norm === "l2" ? Math.hypot(...noise) : noise.reduce((sum, one) => sum + Math.abs(one), 0);
  return state.picture.map((value, i) => Math.min(1, Math.max(-1, value + (size * noise[i]) / length)));
}

let waiting = null;

function judge(text, status) {
  say("attack", text);
  $("attack").className = `verdict ${status}`;
}

function paintWorst(values) {
  $("worst").classList.toggle("none", !values);
  if (values) paint("worst", values);
  else $("worst").getContext("2d").clearRect(0, 0, $("worst").width, $("worst").height);
}

function perturb() {
  showRuler();
  const size = Number($("radius").value);
  const turn = ++state.attackTurn;
  clearTimeout(waiting);
  paintWorst(null);
  if (!state.answer || !size) {
    if (state.picture) paint("random", state.picture);
    say("worst-caption", "the strongest found");
    judge(state.answer ? "Move the slider." : "", "");
    return;
  }
  const held = certified();
  paint("random", randomChange(size, held ? held.norm : "linf"));
  if (held && held.status === "proved" && size <= held.size) {
    say("worst-caption", "none exists");
    judge(`No attack can: within ${size.toFixed(2)} no change at all alters the label (proved${often(held)}).`, "proved");
    return;
  }
  judge("Looking for an attack…", "");
  waiting = setTimeout(() => attack(size, turn), 250);
}

async function attack(size, turn) {
  try {
    const before = column(state.answer, "class_name").data[0];
    const found = await ask(address("attack"), request(state.picture, { radius: size, deadline_ms: 10000 }));
    if (turn !== state.attackTurn) return;
    paintWorst(column(found, "changed_picture").data);
    const after = column(found, "class_name").data[0];
    say("worst-caption", after === before ? "the strongest found" : `now “${after}”`);
    if (after === before) judge(`The strongest attack found within ${size.toFixed(2)} leaves the label. That proves nothing.`, "");
    else judge(`Broken: this change within ${size.toFixed(2)} turns “${before}” into “${after}”.`, "refuted");
  } catch (error) {
    if (turn === state.attackTurn) judge(error.message, "");
  }
}

$("radius").addEventListener("input", () => {
  state.moved = true;
  perturb();
});
$("model").addEventListener("change", choose);
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = $("token").value.trim();
  start();
});
clear();
start();
