"use strict";
// The surfaces of labels as triangles. The squares between a label's voxels and all else are exact, but look like
// stairs. So their corners move to the mean of their neighbours and, which keeps the volume, away from it (Taubin 1995),
// but never far (Gibson 1998): what is one voxel thick stays.
const SMOOTHED = 0.3; // voxels that a corner may move along each direction

// Of each label: its voxels' corners, four of them for each square, and how many squares each other label is behind.
function labelSquares(volume, [W, D, H], count) {
  const AROUND = [[0, 0], [1, 0], [1, 1], [0, 1]]; // counterclockwise as seen from the side to which a square faces
  const sides = [W, D, H], steps = [1, W, W * D], at = [0, 0, 0], corner = [0, 0, 0];
  const found = Array.from({ length: count + 1 }, () => ({ corners: [], squares: [], known: new Map(), behind: new Uint32Array(count + 1) }));
  for (let n = 0; n < volume.length; n++) {
    if (!volume[n]) continue;
    const { corners, squares, known, behind } = found[volume[n]];
    [at[0], at[1], at[2]] = [n % W, Math.floor(n / W) % D, Math.floor(n / steps[2])];
    for (let side = 0; side < 6; side++) {
      const dim = side >> 1, far = side & 1, step = 2 * far - 1, next = at[dim] + step;
      const other = next >= 0 && next < sides[dim] ? volume[n + step * steps[dim]] : 0;
      if (other === volume[n]) continue;
      behind[other]++;
      for (let k = 0; k < 4; k++) {
        const [i, j] = AROUND[far ? k : 3 - k];
        corner[dim] = at[dim] + far;
        corner[(dim + 1) % 3] = at[(dim + 1) % 3] + i;
        corner[(dim + 2) % 3] = at[(dim + 2) % 3] + j;
        const key = (corner[2] * (D + 1) + corner[1]) * (W + 1) + corner[0];
        if (!known.has(key)) known.set(key, corners.push(...corner) / 3 - 1);
        squares.push(known.get(key));
      }
    }
  }
  return found;
}

function smoothCorners({ corners, squares }) {
  const places = Float32Array.from(corners), sums = new Float32Array(places.length);
  const counts = new Uint8Array(places.length);
  for (let round = 0; round < 12; round++) {
    sums.fill(0);
    counts.fill(0);
    squares.forEach((one, n) => {
      const other = squares[n % 4 === 3 ? n - 3 : n + 1];
      for (let dim = 0; dim < 3; dim++) {
        sums[3 * one + dim] += places[3 * other + dim];
        sums[3 * other + dim] += places[3 * one + dim];
        counts[3 * one + dim]++;
        counts[3 * other + dim]++;
      }
    });
    corners.forEach((corner, n) => {
      const moved = places[n] + (round % 2 ? -0.64 : 0.6) * (sums[n] / counts[n] - places[n]);
      places[n] = Math.min(Math.max(moved, corner - SMOOTHED), corner + SMOOTHED);
    });
  }
  return places;
}

const cross = ([a, b, c], [x, y, z]) => [b * z - c * y, c * x - a * z, a * y - b * x];

// A surface in mm: of each corner its place and its normal side by side, and two triangles for each square.
function labelMesh(found, spacing) {
  const places = smoothCorners(found).map((place, n) => place * spacing[n % 3]), { squares } = found;
  const vertices = new Float32Array(2 * places.length), triangles = new Uint32Array(1.5 * squares.length);
  const step = (one, other) => [0, 1, 2].map((dim) => places[3 * other + dim] - places[3 * one + dim]);
  places.forEach((place, n) => (vertices[6 * Math.floor(n / 3) + (n % 3)] = place));
  for (let n = 0; n < squares.length; n += 4) {
    const [a, b, c, d] = squares.slice(n, n + 4), normal = cross(step(a, c), step(b, d));
    for (const one of [a, b, c, d]) for (let dim = 0; dim < 3; dim++) vertices[6 * one + 3 + dim] += normal[dim];
    triangles.set([a, b, c, a, c, d], 1.5 * n);
  }
  return { vertices, triangles };
}
