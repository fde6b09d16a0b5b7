"use strict";
// Sorts the table of points by the column whose head is clicked, a second time the other way round.
for (const [column, button] of document.querySelectorAll("#points th button").entries()) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = document.querySelector("#points tbody");
    const falls = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const key = (row) => row.children[column].dataset.key;
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === ""); // what has no value comes last, both ways
      const order = Number.isNaN(Number(x) + Number(y)) ? x.localeCompare(y) : x - y;
      return falls ? -order : order;
    };
    body.append(...[...body.rows].sort(compare));
  });
}
