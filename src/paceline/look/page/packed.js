// Reads the data of the page, and arrays in base64.

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const found = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) found[i] = text.charCodeAt(i);
  return found;
}

// The data are an object or, if they are long, a string that contains this object as compressed JSON in base64.
async function dataOf(element) {
  const data = JSON.parse(element.textContent);
  element.remove();
  if (typeof data !== "string") return data;
  const stream = new Blob([bytesOf(data)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}
