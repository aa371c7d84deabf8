// The X-ray's pictures, on canvases. Each function draws its arguments and keeps no state.

const FREE = 0, CACHED = 1, SHARED = 2, FIRST_UID = 3; // owners of pages, as the server numbers them

/** The colours of the page's theme. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    text: colour("text"), quiet: colour("quiet"), line: colour("line"), sunken: colour("sunken"),
    wait: colour("phase-1"), prefill: colour("phase-2"), decode: colour("phase-3"), error: colour("error"),
    isDark: style.colorScheme.includes("dark"),
  };
}

export const colourOf = (uid, { isDark }) => `hsl(${(uid * 137.5) % 360} 52% ${isDark ? 62 : 46}%)`;

/** Return the context of a canvas that is as sharp as the screen, cleared, and its size. */
function begin(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  return { context, width, height };
}

const scale = (from, to, width) => (time) => ((time - from) / (to - from)) * width;

function seconds(context, from, to, x, height, colours) {
  context.strokeStyle = colours.line;
  context.fillStyle = colours.quiet;
  context.beginPath();
  for (let at = Math.ceil(from); at <= to; at++) {
    context.moveTo(x(at) + 0.5, 0);
    context.lineTo(x(at) + 0.5, height);
  }
  context.stroke();
}

/** Steps: above the axis the device's time, below it the host's work at that time. */
export function drawSteps(canvas, steps, from, to, now, colours) {
  const { context, width, height } = begin(canvas, 150);
  const x = scale(from, to, width);
  const base = 100;
  seconds(context, from, to, x, height - 18, colours);
  const ago = (time) => (now - time < 0.05 ? "now" : `${(now - time).toFixed(now > to ? 1 : 0)} s ago`);
  context.fillText(ago(from), 0, height - 3);
  context.fillText(ago(to), width - context.measureText(ago(to)).width, height - 3);
  const most = steps.reduce((max, step) => Math.max(max, step.decodes + step.prompt), 1);
  const tall = (tokens) => (tokens ? 4 + (Math.log2(1 + tokens) / Math.log2(1 + most)) * (base - 12) : 0);
  for (const [name, colour] of [["prefill", colours.prefill], ["decode", colours.decode]]) {
    context.fillStyle = colour;
    for (const step of steps) {
      const whole = tall(step.decodes + step.prompt);
      const share = step.decodes / (step.decodes + step.prompt || 1);
      const part = name === "decode" ? whole * share : whole;
      const left = x(step.begin);
      if (part) context.fillRect(left, base - part, Math.max(x(step.end) - left - 0.5, 0.7), part);
    }
  }
  context.fillStyle = colours.wait;
  for (const step of steps) {
    const planned = (step.receive + step.plan + step.launch) * 1e-6;
    const settled = (step.commit + step.send) * 1e-6;
    context.fillRect(x(step.start), base + 8, Math.max(x(step.start + planned) - x(step.start), 0.6), 9);
    context.fillRect(x(step.end), base + 20, Math.max(x(step.end + settled) - x(step.end), 0.6), 9);
  }
  context.strokeStyle = colours.line;
  context.strokeRect(0, base + 0.5, width, 0);
}

export const ROW = 20;

/** Requests as bars. Returns the shown ones from the top: the newest first. */
export function drawRequests(canvas, requests, from, to, selected, colours) {
  const shown = requests.slice(-200).reverse();
  const { context, width, height } = begin(canvas, Math.max(shown.length * ROW, 60));
  const x = scale(from, to, width);
  seconds(context, from, to, x, height, colours);
  for (const [index, request] of shown.entries()) {
    const top = index * ROW;
    if (request.uid === selected) {
      context.fillStyle = colours.sunken;
      context.fillRect(0, top, width, ROW);
    }
    const bar = (begins, ends, colour, size) => {
      const left = Math.max(x(begins), 0);
      context.fillStyle = colour;
      context.fillRect(left, top + (ROW - size) / 2, Math.max(Math.min(x(ends), width) - left, 1), size);
    };
    const end = Math.min(request.ended ?? to, to);
    const start = request.accepted ?? request.launched ?? end;
    bar(start, end, colours.line, 2);
    if (request.accepted != null) bar(request.accepted, Math.min(request.launched ?? end, end), colours.wait, 6);
    for (const span of request.spans)
      if (span.end >= from && span.begin <= to)
        bar(span.begin, Math.min(span.end, to), colours[span.kind], 11);
    context.fillStyle = colours.quiet;
    const label = `${request.uid}${request.retractions ? ` · retracted ${request.retractions}` : ""}`;
    const room = context.measureText(label).width + 8;
    const behind = x(end) + 8;
    context.fillText(label, behind + room < width ? behind : Math.max(x(start) - room, 3), top + 14);
  }
  return shown;
}

/** The pages of the KV pool, coloured by owner. */
export function drawPages(canvas, frame, colours) {
  const count = frame.page_map.reduce((sum, value, index) => sum + (index % 2 ? value : 0), 0);
  const width = canvas.clientWidth;
  const size = Math.max(Math.min(Math.sqrt((width * 150) / Math.max(count, 1)), 14), 3.2);
  const columns = Math.max(Math.floor(width / size), 1);
  const { context } = begin(canvas, Math.max(Math.ceil(count / columns) * size, size));
  const colour = (owner) =>
    owner === FREE ? colours.line : owner === CACHED ? colours.quiet : owner === SHARED ? colours.text : colourOf(owner - FIRST_UID, colours);
  const paths = new Map(); // one for each owner: a change of colour costs more than a rectangle
  let at = 0;
  for (let index = 0; index < frame.page_map.length; index += 2) {
    const [owner, length] = [frame.page_map[index], frame.page_map[index + 1]];
    if (!paths.has(owner)) paths.set(owner, new Path2D());
    for (const end = at + length; at < end; ) {
      // One rectangle for the part of a run in one line; the gaps between pages come last.
      const column = at % columns;
      const part = Math.min(end - at, columns - column);
      paths.get(owner).rect(column * size, Math.floor(at / columns) * size, part * size - 1, size - 1);
      at += part;
    }
  }
  for (const [owner, path] of paths) {
    context.fillStyle = colour(owner);
    context.globalAlpha = owner === FREE ? 0.55 : owner === CACHED ? 0.6 : 1;
    context.fill(path);
  }
  context.globalAlpha = 1;
  for (let column = 1; column <= columns; column++)
    context.clearRect(column * size - 1, 0, 1, Math.ceil(count / columns) * size);
}

/** The prefix tree: each node is as wide as it has pages; children are below their parent.
 *  Returns the place of each node of the frame. */
export function drawTree(canvas, frame, colours) {
  const nodes = frame.tree.map(([parent, pages, locks]) => ({ parent, pages, locks, children: [] }));
  const roots = [];
  for (const node of nodes) (node.parent < 0 ? roots : nodes[node.parent].children).push(node);
  for (const node of nodes.toReversed())
    node.width = Math.max(node.children.reduce((sum, child) => sum + child.width, 0), 1);
  const total = roots.reduce((sum, node) => sum + node.width, 0) || 1;
  const depth = (node) => 1 + node.children.reduce((max, child) => Math.max(max, depth(child)), 0);
  const levels = roots.reduce((max, node) => Math.max(max, depth(node)), 1);
  const tall = Math.max(Math.min(150 / levels, 34), 12);
  const { context, width } = begin(canvas, Math.max(levels * tall, 24));
  const draw = (node, left, top, room) => {
    Object.assign(node, { left, top, right: left + room, bottom: top + tall });
    context.globalAlpha = node.locks ? 1 : 0.5;
    context.fillStyle = node.locks > 1 ? colours.text : node.locks ? colours.decode : colours.quiet;
    context.fillRect(left, top, Math.max(room - 1.5, 0.7), tall - 2);
    if (room > 58 && tall > 15) {
      context.fillStyle = node.locks ? colours.sunken : colours.text;
      context.globalAlpha = 1;
      context.fillText(`${node.pages}${node.locks > 1 ? ` · ${node.locks} share` : ""}`, left + 6, top + tall / 2 + 4, room - 10);
    }
    for (const child of node.children) {
      const part = (child.width / node.width) * room;
      draw(child, left, top + tall, part);
      left += part;
    }
  };
  let left = 0;
  for (const node of roots) {
    draw(node, left, 0, (node.width / total) * width);
    left += (node.width / total) * width;
  }
  context.globalAlpha = 1;
  return nodes;
}
