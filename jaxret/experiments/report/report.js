// Tables are sorted by their headers, which become buttons. Without scripts they are tables.
const read = (row, column) => {
  const cell = row.cells[column];
  return cell.classList.contains("n") ? cell.dataset.value ?? "" : cell.textContent.trim();
};
const order = (one, two) => {
  if (one === "" || two === "") return (one === "") - (two === "");
  const difference = one - two;
  return Number.isNaN(difference) ? one.localeCompare(two, "en", { numeric: true }) : difference;
};
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const down = before ? before === "ascending" : head.classList.contains("n");
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((one, two) => {
        const [a, b] = [read(one, column), read(two, column)];
        return down && a !== "" && b !== "" ? order(b, a) : order(a, b);
      });
      table.tBodies[0].append(...rows);
    });
  });
}
