"use strict";
// The viewer: planes of one case at a time; a volume's voxel (w, d, h) is number (h D + d) W + w.
(() => {
  const told = JSON.parse(document.getElementById("volumes").textContent);
  const viewer = document.getElementById("viewer");
  if (!viewer || !told.cases) return;
  const get = (id) => document.getElementById(id);
  const NAMES = ["sagittal", "coronal", "axial"];
  const ACROSS = [[1, 2], [0, 2], [0, 1]]; // of each plane: the directions that lie across and upwards
  const OVERLAYS = { t: "truth", p: "prediction", r: "disputed", u: "ignored" }; // by key
  const STRIPES = 89, BLACK = 51; // stripes over what the truth leaves unlabelled are lighter by this on black, darker elsewhere
  const VIOLET = [168, 56, 255]; // where readers disagree: no class has this colour
  const LOOK = ["window", "level", "zoom", "fill", "lines", "heat"];
  const HEATS = (told.heat_colours || []).map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
  const PRESETS = { brain: [80, 40], "soft tissue": [400, 40], lung: [1500, -600], bone: [1800, 400] }; // in HU
  const state = { case: 0, modality: "", at: [0, 0, 0], volumes: {}, turn: 0 };
  const current = () => told.cases[state.case];

  async function decode(sheet, entry) {
    const [W, D, H] = entry.shape;
    const image = new Image();
    image.src = "data:image/png;base64," + sheet;
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = image.width;
    canvas.height = image.height;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, image.width, image.height).data;
    const volume = new Uint8Array(W * D * H);
    for (let h = 0; h < H; h++) {
      const left = (h % entry.columns) * W, top = Math.floor(h / entry.columns) * D;
      for (let d = 0; d < D; d++) {
        const row = (top + d) * image.width + left;
        for (let w = 0; w < W; w++) volume[(h * D + d) * W + w] = pixels[4 * (row + w)];
      }
    }
    return volume;
  }

  // Where voxel i of n along the direction across a plane lies in its picture, and the other way round.
  const across = (i, n) => (told.mirrored ? n - 1 - i : i);

  function plane(volume, dim) { // rows from the top: the higher voxels first
    const shape = current().shape, [x, y] = ACROSS[dim];
    const stride = [1, shape[0], shape[0] * shape[1]];
    const start = state.at[dim] * stride[dim];
    const made = new Uint8Array(shape[x] * shape[y]);
    for (let j = 0, n = 0; j < shape[y]; j++)
      for (let i = 0; i < shape[x]; i++, n++)
        made[n] = volume[start + across(i, shape[x]) * stride[x] + (shape[y] - 1 - j) * stride[y]];
    return made;
  }

  function outline(labels, number, width, height, ranks = current().ranks) { // closed lines along the edges of pixels, inside on the right
    // a point says whether the edge to it is drawn: edges to rarer labels are theirs, or two dashed lines look solid
    const label = (x, y) => (x >= 0 && y >= 0 && x < width && y < height ? labels[y * width + x] : 0);
    const turns = new Map();
    const add = (other, x, y, dx, dy) => {
      if (other === number) return;
      const key = y * (width + 1) + x;
      if (!turns.has(key)) turns.set(key, []);
      turns.get(key).push([dx, dy, ranks[other] < ranks[number]]);
    };
    for (let y = 0; y < height; y++)
      for (let x = 0; x < width; x++) {
        if (label(x, y) !== number) continue;
        add(label(x, y - 1), x, y, 1, 0);
        add(label(x + 1, y), x + 1, y, 0, 1);
        add(label(x, y + 1), x + 1, y + 1, -1, 0);
        add(label(x - 1, y), x, y + 1, 0, -1);
      }
    const lines = [];
    while (turns.size) {
      const first = turns.keys().next().value;
      let x = first % (width + 1), y = (first - x) / (width + 1), key = first;
      const line = [[x, y]];
      do {
        const left = turns.get(key), [dx, dy, drawn] = left.pop();
        if (!left.length) turns.delete(key);
        x += dx;
        y += dy;
        key = y * (width + 1) + x;
        line.push([x, y, drawn]);
      } while (key !== first);
      lines.push(line);
    }
    return lines;
  }

  const look = (name) => Number(get(name).value);

  function region(dim) { // the part of a plane that is seen: zoomed, it stays around the voxel where the planes meet
    const [x, y] = ACROSS[dim], { shape } = current();
    const width = shape[x] / look("zoom"), height = shape[y] / look("zoom");
    const place = (middle, side, whole) => Math.min(Math.max(middle + 0.5 - side / 2, 0), whole - side);
    const left = place(across(state.at[x], shape[x]), width, shape[x]);
    return { left, top: place(shape[y] - 1 - state.at[y], height, shape[y]), width, height };
  }

  function heatOf(value) { // the colour of a value from 0 to 255
    const at = (value / 255) * (HEATS.length - 1), below = Math.min(Math.floor(at), HEATS.length - 2), part = at - below;
    return HEATS[below].map((one, n) => one + (HEATS[below + 1][n] - one) * part);
  }

  function range() { // what black and white are in the files' numbers
    return current().ranges[state.modality];
  }

  const inFile = (grey) => range()[0] + (grey / 255) * (range()[1] - range()[0]);

  function format(value) { // in the digits that the grey levels have
    const digits = Math.max(0, Math.ceil(-Math.log10((range()[1] - range()[0]) / 255)));
    return value.toFixed(Math.min(digits, 6)).replace("-", "−");
  }

  function fillPresets() { // of CT by Hounsfield units; others begin with all of their greys
    const options = [new Option("automatic", "")];
    if (current().unit === "HU" && range())
      for (const [name, [width, level]] of Object.entries(PRESETS)) {
        const [low, high] = range(), seen = Math.min(high, level + width / 2) - Math.max(low, level - width / 2);
        const option = new Option(`${name} (W ${width}, L ${String(level).replace("-", "−")})`, name);
        option.disabled = seen < 0.6 * width;
        if (option.disabled) option.text = `${name}: the image keeps ${format(low)} to ${format(high)} HU`;
        options.push(option);
      }
    const byHand = new Option("set by hand", "hand");
    byHand.hidden = true; // shown once it is true, and not to be chosen
    options.push(byHand);
    const before = get("preset").value, kept = options.some(({ value, disabled }) => value === before && !disabled);
    get("preset").replaceChildren(...options);
    get("preset").parentElement.hidden = options.length < 3;
    get("preset").value = kept ? before : "";
    if (before && before !== "hand") usePreset(get("preset").value); // the same units are other greys in each image
  }

  function usePreset(name) {
    const [low, high] = range() || [0, 255], [width, level] = PRESETS[name] || [high - low, (low + high) / 2];
    const grey = 255 / (high - low);
    get("window").max = Math.max(255, Math.round(width * grey));
    get("window").value = Math.round(width * grey);
    get("level").value = PRESETS[name] ? Math.round(2 * (level - low) * grey) / 2 : get("level").defaultValue;
    drawAll();
  }

  function greys(dim) { // a picture of the plane, window and level applied, and the map over it
    const [x, y] = ACROSS[dim], { shape, spacing } = current();
    const finest = Math.min(spacing[x], spacing[y]), period = Math.max((shape[x] * spacing[x]) / 30, (shape[y] * spacing[y]) / 30, 4 * finest); // of stripes, in mm
    const width = Math.max(period / 4, finest);
    const small = document.createElement("canvas");
    small.width = shape[x];
    small.height = shape[y];
    const pixels = new ImageData(small.width, small.height), values = state.volumes.image && plane(state.volumes.image, dim);
    const low = look("level") - look("window") / 2, times = 255 / look("window");
    const heat = state.volumes.heat && plane(state.volumes.heat, dim), strength = look("heat") / 100;
    const [disputed, ignored] = ["disputed", "ignored"].map((id) => get(id).checked && state.volumes[id] && plane(state.volumes[id], dim));
    const shade = (n) => (values ? Math.min(Math.max(Math.round((values[n] - low) * times), 0), 255) : 0);
    const around = (n) => { // the mean of the pixels around one, so that noise decides nothing
      const column = n % shape[x], shades = [];
      for (let up = n - 3 * shape[x]; up <= n + 3 * shape[x]; up += shape[x])
        for (let aside = -3; aside <= 3; aside++)
          if (column + aside >= 0 && column + aside < shape[x] && up >= 0 && up < small.width * small.height) shades.push(shade(up + aside));
      return shades.reduce((sum, one) => sum + one, 0) / shades.length;
    };
    for (let n = 0; n < small.width * small.height; n++) {
      let grey = shade(n);
      const along = (n % shape[x]) * Math.min(spacing[x], width) + Math.floor(n / shape[x]) * Math.min(spacing[y], width);
      if (ignored && ignored[n] && along % period < width) grey = Math.max(0, grey + (grey < 1.5 * BLACK && around(n) < BLACK ? STRIPES : -STRIPES));
      const part = heat ? (strength * heat[n]) / 255 : 0, over = part ? heatOf(heat[n]) : [0, 0, 0];
      let colour = over.map((one) => Math.round(grey + (one - grey) * part));
      if (disputed && disputed[n]) colour = VIOLET.map((one, at) => 0.55 * one + 0.45 * colour[at]);
      pixels.data.set([...colour, 255], 4 * n);
    }
    small.getContext("2d").putImageData(pixels, 0, 0);
    return small;
  }

  function draw(dim) {
    const entry = current(), [x, y] = ACROSS[dim], { shape, spacing } = entry;
    const canvas = get("plane-" + dim), { left, top, width, height } = region(dim);
    const density = window.devicePixelRatio || 1;
    canvas.width = Math.round((canvas.clientWidth || 340) * density);
    canvas.height = Math.round((canvas.width * shape[y] * spacing[y]) / (shape[x] * spacing[x]));
    const context = canvas.getContext("2d");
    context.drawImage(greys(dim), left, top, width, height, 0, 0, canvas.width, canvas.height);
    const sx = canvas.width / width, sy = canvas.height / height;
    const tint = state.volumes.image ? "multiply" : "source-over";
    for (const kind of ["truth", "prediction"]) {
      if (!get(kind).checked) continue;
      const labels = plane(state.volumes[kind], dim);
      context.setLineDash(kind === "truth" ? [] : [5, 4]);
      context.lineWidth = 1.6 * density;
      told.labels.forEach((label, n) => {
        context.strokeStyle = context.fillStyle = label.colour;
        const area = new Path2D(), edges = new Path2D();
        for (const line of outline(labels, n + 1, shape[x], shape[y]))
          line.forEach(([i, j, drawn], k) => {
            area[k ? "lineTo" : "moveTo"]((i - left) * sx, (j - top) * sy);
            edges[drawn ? "lineTo" : "moveTo"]((i - left) * sx, (j - top) * sy);
          });
        context.globalAlpha = look("fill") / 100;
        context.globalCompositeOperation = tint; // dark tissue stays dark
        context.fill(area);
        context.globalCompositeOperation = "source-over";
        context.globalAlpha = look("lines") / 100;
        context.stroke(edges);
      });
    }
    context.globalAlpha = 1;
    if (get("ignored").checked && state.volumes.ignored) {
      const edges = new Path2D();
      for (const line of outline(plane(state.volumes.ignored, dim), 1, shape[x], shape[y], [0, 1]))
        line.forEach(([i, j, drawn]) => edges[drawn ? "lineTo" : "moveTo"]((i - left) * sx, (j - top) * sy));
      context.setLineDash([1.5, 3]);
      context.lineWidth = density;
      context.strokeStyle = "#fff";
      context.stroke(edges);
    }
    mark(context, canvas, entry.open_sides ? "????" : told.sides[dim]);
    drawScale(context, canvas, (width * spacing[x]) / canvas.width);
    const mm = [x, y].map((axis) => Number(spacing[axis].toPrecision(3))).join(" × ");
    get("told-" + dim).textContent = `${NAMES[dim]} ${entry.slices[dim][state.at[dim]]} / ${entry.counts[dim]} · pixels of ${mm} mm`;
    get("slice-" + dim).value = state.at[dim];
  }

  function write(context, text, x, y) { // white with a dark edge, to be read on any grey
    context.setLineDash([]);
    context.lineWidth = 3 * (window.devicePixelRatio || 1);
    context.strokeStyle = "#000";
    context.strokeText(text, x, y);
    context.fillStyle = "#fff";
    context.fillText(text, x, y);
  }

  function drawScale(context, { width, height }, mm) { // a bar of a round length, at most a quarter of the picture; mm of a pixel
    const most = (width * mm) / 4, power = 10 ** Math.floor(Math.log10(most));
    const length = power * [5, 2, 1].find((factor) => power * factor <= most);
    const size = 11 * (window.devicePixelRatio || 1), y = height - size / 2;
    context.font = `${size}px sans-serif`;
    context.textAlign = "left";
    context.textBaseline = "bottom";
    write(context, `${Number(length.toPrecision(2))} mm`, size / 2, y - 2);
    context.fillRect(size / 2, y - 1, length / mm, 2);
  }

  function mark(context, canvas, sides) {
    const size = 12 * (window.devicePixelRatio || 1), { width, height } = canvas;
    const places = [[size, height / 2], [width - size, height / 2], [width / 2, size], [width / 2, height - size]];
    context.font = `${size}px sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    places.forEach(([x, y], n) => write(context, sides[n], x, y));
  }

  function remember() { // what is seen, in the page's address
    const parts = { case: current().name, modality: state.modality, at: state.at.join(",") };
    for (const id of Object.values(OVERLAYS)) parts[id] = Number(get(id).checked);
    parts.look = LOOK.map(look).join(",");
    if (surfaces?.address()) parts.surfaces = surfaces.address();
    try {
      history.replaceState(null, "", "#" + new URLSearchParams(parts));
    } catch { /* a page without an address cannot remember its place */ }
  }

  function drawAll() {
    [0, 1, 2].forEach(draw);
    const unit = current().unit ? ` ${current().unit}` : "", width = (inFileWidth) => format(inFile(inFileWidth) - inFile(0));
    get("look").textContent = range() ? `Window ${width(look("window"))}${unit}, level ${format(inFile(look("level")))}${unit}.` : current().modalities.length ? "" : "Only labels: the images are not known.";
    remember();
  }

  function move(dim, to) {
    state.at[dim] = Math.min(Math.max(to, 0), current().shape[dim] - 1);
    drawAll();
  }

  function valueAt(voxel) { // what the image, the labels and the map have at a voxel, in words
    const { shape, unit } = current(), n = (voxel[2] * shape[1] + voxel[1]) * shape[0] + voxel[0];
    const { image, truth, prediction, heat, disputed, ignored } = state.volumes, words = [];
    if (image && range()) {
      const ends = image[n] === 0 ? "≤ " : image[n] === 255 ? "≥ " : "≈ ";
      words.push(`${state.modality} ${ends}${format(inFile(image[n]))}${unit ? ` ${unit}` : ""}`);
    }
    const name = (number) => (number ? told.labels[number - 1].name : "none");
    const open = truth[n] ? [] : current().hidden.map(name), unknown = open.length ? ` (not annotated: ${open.join(", ")})` : "";
    if (told.labels.length) words.push(...(get("truth").parentElement.hidden ? [] : [`truth: ${ignored && ignored[n] ? "unlabelled" : name(truth[n]) + unknown}`]), `prediction: ${name(prediction[n])}`);
    if (disputed) words.push(disputed[n] ? "readers disagree" : "readers agree");
    const { heat_name: shown, most_nats: most } = current();
    if (heat) words.push(`${shown}: ${((heat[n] / 255) * (most || 1)).toFixed(2)} ${most ? "nats" : "of its maximum"}`);
    return words.join(" · ");
  }

  async function open(index, modality, at) {
    const turn = ++state.turn, entry = told.cases[index];
    viewer.setAttribute("aria-busy", "true");
    const chosen = entry.modalities.includes(modality) ? modality : entry.favourite;
    const number = entry.modalities.indexOf(chosen);
    const sheets = { image: entry.images[number], truth: entry.truth, prediction: entry.prediction, heat: entry.heat, ...entry.areas };
    const decoded = Object.entries(sheets).map(async ([name, sheet]) => [name, sheet && (await decode(sheet, entry))]);
    const volumes = Object.fromEntries(await Promise.all(decoded));
    if (turn !== state.turn) return; // another case was chosen meanwhile
    Object.assign(state, { case: index, modality: chosen, volumes });
    state.at = (at || entry.at).map((n, dim) => Math.min(Math.max(n, 0), entry.shape[dim] - 1));
    get("modality").replaceChildren(...entry.modalities.map((name) => new Option(name)));
    get("modality").value = chosen;
    for (const label of [get("modality-label"), get("window").parentElement, get("level").parentElement])
      label.hidden = !entry.modalities.length;
    get("case").selectedIndex = index;
    const [w, d] = entry.shape.map((side, dim) => side * entry.spacing[dim]);
    get("planes").style.gridTemplateColumns = `${d}fr ${w}fr ${w}fr`; // as many pixels to a mm in each plane
    entry.shape.forEach((side, dim) => (get("slice-" + dim).max = side - 1));
    fillPresets();
    if (get("heat-name")) get("heat-name").textContent = entry.heat_name || "no map of this case";
    get("heat-caution").textContent = entry.heat_caution;
    get("heat-caution").hidden = !entry.heat_caution;
    drawAll();
    surfaces?.show(entry, state.volumes);
    viewer.setAttribute("aria-busy", "false");
  }

  [0, 1, 2].forEach((dim) => {
    const canvas = get("plane-" + dim);
    let rest = 0;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.ctrlKey) {
        get("zoom").value = look("zoom") - Math.sign(event.deltaY) * 0.5;
        drawAll();
        return;
      }
      rest += event.deltaMode ? event.deltaY * 30 : event.deltaY;
      const steps = Math.trunc(rest / 30);
      rest -= steps * 30;
      if (steps) move(dim, state.at[dim] - Math.sign(steps) * Math.min(Math.abs(steps), 4));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 10, PageDown: -10 }[event.key];
      if (!by) return;
      event.preventDefault();
      move(dim, state.at[dim] + by);
    });
    const voxelAt = (event) => { // the voxel of the plane under the cursor
      const [x, y] = ACROSS[dim], { shape } = current(), box = canvas.getBoundingClientRect(), seen = region(dim);
      const right = Math.floor(seen.left + ((event.clientX - box.left) / box.width) * seen.width);
      const down = Math.floor(seen.top + ((event.clientY - box.top) / box.height) * seen.height);
      const voxel = [...state.at];
      voxel[x] = across(Math.min(Math.max(right, 0), shape[x] - 1), shape[x]);
      voxel[y] = Math.min(Math.max(shape[y] - 1 - down, 0), shape[y] - 1);
      return voxel;
    };
    canvas.addEventListener("click", (event) => {
      state.at = voxelAt(event);
      drawAll();
    });
    canvas.addEventListener("mousemove", (event) => {
      get("value").textContent = valueAt(voxelAt(event));
    });
    canvas.addEventListener("mouseleave", () => {
      get("value").textContent = get("value").dataset.idle;
    });
    get("slice-" + dim).addEventListener("input", (event) => move(dim, Number(event.target.value)));
  });
  document.addEventListener("keydown", (event) => {
    const id = OVERLAYS[event.key];
    if (!id || event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    get(id).click();
  });
  for (const id of Object.values(OVERLAYS)) get(id).addEventListener("change", drawAll);
  for (const id of LOOK) get(id).addEventListener("input", drawAll);
  get("reset").addEventListener("click", () => {
    get("preset").value = "";
    get("window").max = 255;
    for (const id of LOOK) get(id).value = get(id).defaultValue;
    drawAll();
  });
  get("preset").addEventListener("change", (event) => usePreset(event.target.value));
  for (const id of ["window", "level"]) get(id).addEventListener("input", () => (get("preset").value = "hand"));
  get("value").dataset.idle = get("value").textContent;
  get("case").addEventListener("change", (event) => open(event.target.selectedIndex, state.modality));
  get("modality").addEventListener("change", (event) => open(state.case, event.target.value, state.at));
  window.addEventListener("resize", drawAll);

  const surfaces = get("surfaces") && makeSurfaces({ told, get, write, drawScale, changed: remember });
  const asked = new URLSearchParams(location.hash.slice(1));
  get("case").replaceChildren(...told.cases.map((entry) => new Option(entry.name)));
  for (const id of Object.values(OVERLAYS)) if (asked.has(id)) get(id).checked = asked.get(id) === "1";
  const looks = (asked.get("look") || "").split(",");
  if (looks.length === LOOK.length) {
    get("window").max = Math.max(255, Number(looks[LOOK.indexOf("window")]) || 255); // as wide as a preset made it
    LOOK.forEach((id, n) => (get(id).value = looks[n]));
  }
  const isByHand = ["window", "level"].some((id) => get(id).value !== get(id).defaultValue);
  if (isByHand) get("preset").replaceChildren(new Option("set by hand", "hand"));
  const at = (asked.get("at") || "").split(",").map(Number);
  surfaces?.restore(asked.get("surfaces") || "");
  viewer.hidden = false;
  const index = Math.max(told.cases.findIndex((entry) => entry.name === asked.get("case")), 0);
  open(index, asked.get("modality") || "", at.length === 3 && at.every(Number.isInteger) ? at : null);
})();
