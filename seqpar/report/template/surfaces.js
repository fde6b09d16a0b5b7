"use strict";
// Surfaces of truth and prediction in 3D. Places are in mm to the patient's right, to the front and upwards. WebGL 2
// draws into a canvas that is not on the page; its picture, letters and a scale bar go onto the one that is. All cases
// share this one context.
const makeSurfaces = ({ told, get, write, drawScale, changed }) => {
  const KINDS = ["truth", "prediction"], LETTERS = ["LR", "PA", "IS"]; // letters: what lies at the low and the high end
  const OVER = 0.35; // what is left of the truth's opacity over the prediction
  const AROUND = 40; // % of opacity that a class around others begins with
  const VERTEX = `#version 300 es
    layout(location = 0) in vec3 place;
    layout(location = 1) in vec3 normal;
    uniform mat3 turn;
    uniform vec3 middle, scale, shift;
    out vec3 facing;
    void main() {
      facing = turn * normal;
      gl_Position = vec4(turn * (place - middle) * scale + shift, 1.0);
    }`;
  const FRAGMENT = `#version 300 es
    precision highp float;
    in vec3 facing;
    uniform vec3 colour;
    uniform float opacity;
    out vec4 seen;
    void main() { // lit from above the viewer's left shoulder; translucent surfaces are denser at their rims
      vec3 normal = normalize(facing);
      float light = 0.3 + 0.7 * max(dot(normal, normalize(vec3(-0.4, 0.5, 1.0))), 0.0);
      float rim = 0.5 * pow(1.0 - abs(normal.z), 2.0);
      seen = vec4(colour * light, 1.0) * mix(opacity, 1.0, opacity < 1.0 ? rim : 0.0);
    }`;
  const part = get("surfaces"), canvas = get("surface-picture"), layout = get("surface-layout");
  const from = get("surface-from"), pointers = new Map();
  const START = { yaw: told.mirrored ? 0 : 180, pitch: 0, zoom: 1, right: 0, up: 0 }; // in degrees and mm
  const view = { ...START }, off = new Set(), chosen = new Map(); // numbers of classes; their opacities, if chosen
  let gl = null, program = null, shown = null, meshes = null;
  let around = [], middle = [0, 0, 0], radius = 1, mm = 1; // which classes are around others; mm of a pixel

  const has = (kind) => !get(kind).parentElement.hidden;
  const limited = (value, low, high) => Math.min(Math.max(value, low), high);

  function start() { // a context with the program, null where the browser has none
    const made = document.createElement("canvas").getContext("webgl2");
    if (!made) return null;
    program = made.createProgram();
    for (const [kind, text] of [[made.VERTEX_SHADER, VERTEX], [made.FRAGMENT_SHADER, FRAGMENT]]) {
      const shader = made.createShader(kind);
      made.shaderSource(shader, text);
      made.compileShader(shader);
      made.attachShader(program, shader);
    }
    made.linkProgram(program);
    made.useProgram(program);
    for (const ability of [made.CULL_FACE, made.DEPTH_TEST, made.BLEND]) made.enable(ability);
    made.blendFunc(made.ONE, made.ONE_MINUS_SRC_ALPHA);
    made.canvas.addEventListener("webglcontextlost", () => { // opened again, the part makes all of it again
      [gl, meshes, part.open] = [null, null, false];
    });
    return made.getProgramParameter(program, made.LINK_STATUS) ? made : null;
  }

  function upload({ vertices, triangles }) {
    const array = gl.createVertexArray(), buffers = [gl.createBuffer(), gl.createBuffer()];
    gl.bindVertexArray(array);
    gl.bindBuffer(gl.ARRAY_BUFFER, buffers[0]);
    gl.bufferData(gl.ARRAY_BUFFER, vertices, gl.STATIC_DRAW);
    gl.bindBuffer(gl.ELEMENT_ARRAY_BUFFER, buffers[1]);
    gl.bufferData(gl.ELEMENT_ARRAY_BUFFER, triangles, gl.STATIC_DRAW);
    for (const number of [0, 1]) {
      gl.enableVertexAttribArray(number);
      gl.vertexAttribPointer(number, 3, gl.FLOAT, false, 24, 12 * number);
    }
    return { array, buffers, count: triangles.length };
  }

  function forget() {
    for (const one of Object.values(meshes || {}).flat().filter(Boolean)) {
      gl.deleteVertexArray(one.array);
      for (const buffer of one.buffers) gl.deleteBuffer(buffer);
    }
    meshes = null;
  }

  function build() { // the surfaces of the case, once somebody looks at them
    if (!part.open || !shown || meshes) return;
    gl ||= start();
    get("surface-view").hidden = !gl;
    get("no-surfaces").hidden = Boolean(gl);
    if (!gl) return;
    const { shape, spacing, factors } = shown, low = [Infinity, Infinity, Infinity], high = low.map((one) => -one);
    const found = KINDS.map((kind) => labelSquares(shown[kind], shape, told.labels.length));
    const corners = found.flat().map((one) => one.corners);
    for (const one of corners)
      one.forEach((place, n) => {
        low[n % 3] = Math.min(low[n % 3], place * spacing[n % 3]);
        high[n % 3] = Math.max(high[n % 3], place * spacing[n % 3]);
      });
    middle = low.map((place, dim) => (place < high[dim] ? (place + high[dim]) / 2 : 0));
    radius = Math.max(...corners.map((one) => farthest(one, spacing)), 1e-3);
    around = told.labels.map((_, n) => found.flat().some(({ squares, behind }) => behind[n + 1] > squares.length / 8));
    meshes = {};
    KINDS.forEach((kind, k) => {
      meshes[kind] = found[k].map((one) => (one.squares.length ? upload(labelMesh(one, spacing)) : null));
    });
    get("surface-classes").replaceChildren(...told.labels.map(choice));
    const sides = spacing.map((side) => Number(side.toPrecision(3))).join(" × ");
    const block = factors.some((one) => one > 1) && factors.join(" × ");
    const coarse = block ? `, one for each block of ${block}, so small parts may be missing` : "";
    get("surface-note").textContent = `Surfaces of the labels as stored on this page: voxels of ${sides} mm${coarse}. `
      + `They are smoothed by at most ${SMOOTHED} of a voxel along each direction.`;
  }

  function farthest(corners, spacing) { // the distance of the farthest corner from the middle
    let most = 0;
    for (let n = 0; n < corners.length; n += 3)
      most = Math.max(most, Math.hypot(...middle.map((place, dim) => corners[n + dim] * spacing[dim] - place)));
    return most;
  }

  function strengthOf(number) { // in %, 0 if the class is switched off; what is inside a class is seen through it
    return off.has(number) ? 0 : chosen.get(number) ?? (around[number - 1] ? AROUND : 100);
  }

  function choice({ name, colour }, n) { // a class: switched off and on, its opacity, and where the case lacks it
    const number = n + 1, part = document.createElement("span"), label = document.createElement("label");
    const lacks = KINDS.filter((kind) => has(kind) && !meshes[kind][number]);
    const texts = lacks.map((kind) => {
      if (shown.present[kind].includes(number)) return `${kind} too small for the voxels here`;
      return kind === "prediction" ? "not predicted" : shown.hidden.includes(number) ? "not annotated" : shown.areas.ignored ? "not in the labelled part" : "not in the truth";
    });
    const [box, range] = ["checkbox", "range"].map((type) => Object.assign(document.createElement("input"), { type }));
    const swatch = document.createElement("i");
    box.checked = !off.has(number);
    box.addEventListener("change", () => {
      if (box.checked) off.delete(number);
      else off.add(number);
      settle();
    });
    Object.assign(range, { min: 10, max: 100, value: strengthOf(number) || 100, title: `opacity of ${name}` });
    range.addEventListener("input", () => {
      chosen.set(number, Number(range.value));
      settle();
    });
    swatch.style.background = colour;
    label.append(box, " ", swatch, name, texts.length ? ` (${texts.join(", ")})` : "");
    part.append(label, " ", range);
    return part;
  }

  function turned() { // what is to the right of the picture, at its top, and towards the viewer
    const [yaw, pitch] = [view.yaw, view.pitch].map((degrees) => (degrees * Math.PI) / 180);
    const towards = [Math.cos(pitch) * Math.sin(yaw), Math.cos(pitch) * Math.cos(yaw), Math.sin(pitch)];
    const up = [-Math.sin(pitch) * Math.sin(yaw), -Math.sin(pitch) * Math.cos(yaw), Math.cos(pitch)];
    return [cross(up, towards), up, towards];
  }

  function set(kind, name, ...values) {
    gl[`uniform${kind}`](gl.getUniformLocation(program, name), ...values);
  }

  function drawAll(kinds) { // solid surfaces, then translucent ones, inner ones first; returns whether there were any
    const parts = kinds.flatMap((kind) => told.labels.map((_, n) => {
      const strength = (strengthOf(n + 1) / 100) * (kind === "truth" && kinds.length > 1 ? OVER : 1);
      return { strength, rank: shown.ranks[n + 1] || 0, colour: told.labels[n].colour, mesh: meshes[kind][n + 1] };
    })).filter(({ strength, mesh }) => strength && mesh);
    parts.sort((one, other) => (other.strength === 1) - (one.strength === 1) || other.rank - one.rank);
    for (const { strength, colour, mesh } of parts) {
      gl.depthMask(strength === 1);
      set("1f", "opacity", strength);
      set("3f", "colour", ...[1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255));
      gl.bindVertexArray(mesh.array);
      gl.drawElements(gl.TRIANGLES, mesh.count, gl.UNSIGNED_INT, 0);
    }
    return parts.length > 0;
  }

  function draw() {
    if (!part.open || !meshes || !canvas.clientWidth) return;
    const density = window.devicePixelRatio || 1, size = 12 * density;
    const turn = turned(), context = canvas.getContext("2d");
    const kinds = KINDS.filter((kind) => has(kind) && get(kind).checked);
    const panes = layout.value === "over" && kinds.length > 1 ? [["prediction", "truth"]] : kinds.map((kind) => [kind]);
    const width = Math.round(canvas.clientWidth * density), height = Math.round(canvas.clientHeight * density);
    const pane = Math.floor(width / Math.max(panes.length, 1));
    mm = radius / (0.45 * view.zoom * Math.min(pane, height));
    for (const one of [gl.canvas, canvas]) Object.assign(one, { width, height });
    set("Matrix3fv", "turn", false, [0, 1, 2].flatMap((dim) => turn.map((axis) => axis[dim])));
    set("3fv", "middle", middle);
    set("3f", "scale", 2 / (pane * mm), 2 / (height * mm), -0.9 / radius);
    set("3f", "shift", (2 * view.right) / (pane * mm), (2 * view.up) / (height * mm), 0);
    gl.depthMask(true);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
    const drawn = panes.map((pair, n) => {
      gl.viewport(n * pane, 0, pane, height);
      return drawAll(pair);
    });
    context.drawImage(gl.canvas, 0, 0);
    const say = (text, x, y, align, baseline) => {
      Object.assign(context, { font: `${size}px sans-serif`, textAlign: align, textBaseline: baseline });
      write(context, text, x, y);
    };
    panes.forEach((pair, n) => {
      const left = n * pane, x = left + pane / 2, [right, up] = turn, gap = size / 2;
      if (n) context.fillRect(left, 0, density, height);
      if (!drawn[n]) say("none of the classes", x, height / 2, "center", "middle");
      say(pair.length > 1 ? "truth (fainter) over prediction" : pair[0], left + gap, gap, "left", "top");
      say(letters(right, -1), left + gap, height / 2, "left", "middle");
      say(letters(right, 1), left + pane - gap, height / 2, "right", "middle");
      say(letters(up, 1), x, gap, "center", "top");
      say(letters(up, -1), x, height - gap, "center", "bottom");
    });
    if (!panes.length) say("truth and prediction are switched off", width / 2, height / 2, "center", "middle");
    drawScale(context, { width: pane, height }, mm);
    from.value = `${view.yaw},${view.pitch}`;
    if (from.selectedIndex < 0) from.value = "";
  }

  function letters(direction, sign) { // as on a workstation: LA is to the left, and less so to the front
    if (shown.open_sides) return "?"; // the file leaves open how the patient lies
    const dims = [0, 1, 2].filter((dim) => Math.abs(direction[dim]) > 0.3);
    dims.sort((one, other) => Math.abs(direction[other]) - Math.abs(direction[one]));
    return dims.map((dim) => LETTERS[dim][Number(sign * direction[dim] > 0)]).join("");
  }

  function turnBy(right, down) { // in degrees, as if one took hold of the side that is seen
    view.yaw = ((((view.yaw + right + 180) % 360) + 360) % 360) - 180 || 0;
    if (view.yaw === -180) view.yaw = 180;
    view.pitch = limited(view.pitch + down, -90, 90);
  }

  function zoomBy(factor) {
    view.zoom = limited(view.zoom * factor, 0.5, 20);
  }

  function settle() {
    draw();
    changed();
  }

  function drag(event) { // one pointer turns, or moves if Shift is held; two zoom
    const before = pointers.get(event.pointerId), now = [event.clientX, event.clientY];
    if (!before) return;
    const [x, y] = now.map((one, n) => one - before[n]);
    pointers.set(event.pointerId, now);
    if (pointers.size === 2) {
      const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
      const apart = (one) => Math.max(Math.hypot(one[0] - other[0], one[1] - other[1]), 1);
      zoomBy(apart(now) / apart(before));
    } else if (event.shiftKey) {
      const density = window.devicePixelRatio || 1;
      view.right += x * mm * density;
      view.up -= y * mm * density;
    } else turnBy(x / 2, y / 2);
    draw();
  }

  function press(event) {
    const by = { ArrowRight: [10, 0], ArrowLeft: [-10, 0], ArrowDown: [0, 10], ArrowUp: [0, -10] }[event.key];
    const zoom = { "+": 1.25, "=": 1.25, "-": 0.8 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !(by || zoom)) return;
    event.preventDefault();
    if (by) turnBy(...by);
    else zoomBy(zoom);
    settle();
  }

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
  });
  canvas.addEventListener("pointermove", drag);
  for (const end of ["pointerup", "pointercancel"])
    canvas.addEventListener(end, (event) => {
      pointers.delete(event.pointerId);
      changed();
    });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoomBy(event.deltaY < 0 ? 1.1 : 1 / 1.1);
    settle();
  }, { passive: false });
  canvas.addEventListener("keydown", press);
  from.addEventListener("change", () => {
    [view.yaw, view.pitch] = from.value.split(",").map(Number);
    settle();
  });
  get("surface-reset").addEventListener("click", () => {
    Object.assign(view, START);
    off.clear();
    chosen.clear();
    get("surface-classes").replaceChildren(...told.labels.map(choice));
    settle();
  });
  layout.addEventListener("input", settle);
  for (const kind of KINDS) get(kind).addEventListener("change", draw);
  window.addEventListener("resize", draw);
  part.addEventListener("toggle", () => {
    build();
    settle();
  });

  return {
    show(entry, volumes) { // a case that the viewer has opened; another image of it changes nothing
      if (shown?.entry === entry) return;
      forget();
      shown = { ...entry, ...volumes, entry };
      build();
      draw();
    },
    address() { // how the surfaces are seen, in short; "" if nobody looks at them
      const numbers = Object.values(view).map((one) => Number(one.toPrecision(4)));
      const strengths = told.labels.map((_, n) => (off.has(n + 1) ? 0 : chosen.get(n + 1) ?? ""));
      return part.open ? [...numbers, layout.selectedIndex, ...strengths].join(",") : "";
    },
    restore(address) {
      const words = address.split(","), numbers = words.slice(0, 6).map(Number);
      if (words.length !== 6 + told.labels.length || !numbers.every(Number.isFinite)) return;
      Object.keys(view).forEach((name, n) => (view[name] = numbers[n]));
      turnBy(0, 0);
      zoomBy(1);
      layout.selectedIndex = numbers[5];
      words.slice(6).forEach((word, n) => {
        if (word === "0") off.add(n + 1);
        else if (word) chosen.set(n + 1, limited(Number(word) || 100, 10, 100));
      });
      part.open = true;
    },
  };
};
