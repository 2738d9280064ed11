"use strict";
(() => {
  const says = document.getElementById("says");

  // A row of a chart's table, in words.
  const tell = (figure, row) => {
    const table = figure.querySelector("table");
    const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
    const cells = [...table.tBodies[0].rows[row].cells].map((cell) => cell.textContent.trim());
    const parts = cells.map((text, n) => (n ? heads[n] + " " + text : text));
    says.textContent = parts.filter((text, n) => !n || !/ 0$/.test(text)).join(" · ");
  };

  // Arrow keys and the pointer walk the columns of a chart, or else whatever in it has a title.
  for (const svg of document.querySelectorAll("svg.chart")) {
    const columns = [...svg.querySelectorAll(".hit")];
    const marks = columns.length
      ? columns
      : [...svg.querySelectorAll("title")].map((title) => title.parentNode);
    const figure = svg.closest("figure");
    let at = -1;
    const leave = () => {
      if (marks[at]) marks[at].classList.remove("at", "lit");
      says.textContent = "";
    };
    const move = (to) => {
      leave();
      at = Math.max(0, Math.min(marks.length - 1, to));
      marks[at].classList.add(columns.length ? "at" : "lit");
      if (columns.length) tell(figure, at);
      else says.textContent = marks[at].querySelector("title").textContent;
    };
    if (!marks.length) continue;
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return leave();
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: marks.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      move(to);
    });
    svg.addEventListener("pointermove", (event) => {
      const mark = marks.indexOf(event.target);
      if (mark >= 0 && (mark !== at || !says.textContent)) move(mark);
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
  }

  // Tables are sorted by the column whose head is pressed; again: the other way.
  for (const button of document.querySelectorAll("table.sortable th button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const table = head.closest("table");
      const up = head.getAttribute("aria-sort") === "descending";
      for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => {
        const cell = row.cells[head.cellIndex];
        return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
      };
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows);
    });
  }

  const theme = document.getElementById("theme");
  theme.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    theme.setAttribute("aria-pressed", String(!dark));
  });
})();
