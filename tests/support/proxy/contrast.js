() => {
  const parse = (text) => (text.match(/[\d.]+/g) ?? []).map(Number);
  const over = (top, under) => {
    const alpha = top[3] ?? 1;
    return [0, 1, 2].map((channel) => top[channel] * alpha + under[channel] * (1 - alpha));
  };
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const luminance = (color) => {
    const [red, green, blue] = color.map((channel) => linear(channel / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const grounds = new Map([[null, [255, 255, 255]]]);
  const ground = (element) => {
    if (!grounds.has(element)) grounds.set(element, over(parse(getComputedStyle(element).backgroundColor), ground(element.parentElement)));
    return grounds.get(element);
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].filter((each) => each.nodeType === 3).map((each) => each.textContent.trim()).join("");
    if (!text || !element.checkVisibility() || element.closest("svg, .unseen, .skip, :disabled")) continue;
    const under = ground(element);
    const both = [luminance(over(parse(getComputedStyle(element).color), under)), luminance(under)];
    const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    found.push([ratio, text.slice(0, 30), element.className]);
  }
  return found.sort((one, other) => one[0] - other[0]);
}
