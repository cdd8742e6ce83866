"use strict";
// The values under the pointer, a switch between light and dark, charts as files. The page is whole without them.
{
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const isDark = () => root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.hidden = false;
  button.onclick = () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); };
  label();

  const number = (v) => Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3)
    ? v.toExponential(3)
    : Number(v.toPrecision(5)).toString();

  // The point of a curve that is nearest to a step; points stand in the order of their steps.
  const nearest = (points, step) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
  };

  const save = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  // A chart as a file of its own: with the style sheet, the theme as it is shown, paper under it and its heading.
  const alone = (svg) => {
    const above = 32;
    const box = svg.viewBox.baseVal;
    const [width, height] = [box.width, box.height + above];
    const copy = svg.cloneNode(true);
    copy.querySelectorAll(".pointer").forEach((line) => line.remove());
    const set = (element, values) => {
      for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
      return element;
    };
    const make = (name, values) => set(document.createElementNS(svg.namespaceURI, name), values);
    set(copy, { width, height, viewBox: `0 -${above} ${width} ${height}`, "data-theme": isDark() ? "dark" : "light" });
    const style = make("style", {});
    style.textContent = document.querySelector("style").textContent;
    const title = make("text", { class: "title", x: 12, y: -10 });
    const unit = make("tspan", {});
    const caption = svg.parentElement.querySelector("figcaption");
    title.textContent = caption.firstChild.textContent;
    unit.textContent = caption.querySelector("span").textContent;
    title.append(unit);
    copy.prepend(style, make("rect", { class: "paper", y: -above, width, height }), title);
    return [new XMLSerializer().serializeToString(copy), width, height];
  };

  // The picture has three pixels for each unit of the chart.
  const picture = (svg) => new Promise((resolve, reject) => {
    const [text, width, height] = alone(svg);
    const image = new Image();
    image.onerror = reject;
    image.onload = () => {
      const canvas = document.createElement("canvas");
      canvas.width = 3 * width;
      canvas.height = 3 * height;
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob(resolve, "image/png");
    };
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
  });

  for (const figure of document.querySelectorAll("figure[id]")) {
    const svg = figure.querySelector("svg");
    const forms = document.createElement("div");
    forms.className = "forms";
    const button = (form, make) => {
      const made = document.createElement("button");
      made.type = "button";
      made.textContent = form.toUpperCase();
      made.title = `Save this chart as ${form.toUpperCase()}`;
      made.onclick = async () => save(await make(), `${figure.id}.${form}`);
      forms.append(made);
    };
    button("png", () => picture(svg));
    button("svg", () => new Blob([alone(svg)[0]], { type: "image/svg+xml" }));
    figure.prepend(forms);
  }

  for (const script of document.querySelectorAll("figure > script")) {
    const data = JSON.parse(script.textContent);
    const figure = script.parentElement;
    const svg = figure.querySelector("svg");
    const line = document.createElementNS(svg.namespaceURI, "path");
    line.setAttribute("class", "pointer");
    const tip = document.createElement("div");
    tip.className = "tip";
    const leave = () => { line.remove(); tip.remove(); };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * data.width;
      if (x < data.left || x > data.right) { leave(); return; }
      const step = data.low + (x - data.left) / (data.right - data.left) * (data.high - data.low);
      const shown = data.curves.filter((curve) => curve.points.length > 0);
      const found = shown.map((curve) => [curve, nearest(curve.points, step)]);
      if (found.length === 0) return;
      const at = found.reduce((a, b) => Math.abs(b[1][0] - step) < Math.abs(a[1][0] - step) ? b : a)[1][0];
      const place = data.left + (at - data.low) / (data.high - data.low) * (data.right - data.left);
      line.setAttribute("d", `M${place} ${data.top}V${data.bottom}`);
      svg.append(line);
      tip.replaceChildren(`step ${Math.round(at)}`);
      for (const [curve, point] of found) {
        const row = document.createElement("div");
        const mark = document.createElement("i");
        mark.style.background = curve.colour;
        row.append(mark, `${curve.name}  ${number(point[1])}`);
        tip.append(row);
      }
      figure.append(tip);
      const outer = figure.getBoundingClientRect();
      const left = event.clientX - outer.left + 14;
      tip.style.left = `${left + tip.offsetWidth > outer.width ? left - tip.offsetWidth - 28 : left}px`;
      tip.style.top = `${event.clientY - outer.top + 12}px`;
    });
  }
}
