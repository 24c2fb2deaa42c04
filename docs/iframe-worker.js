// Search runs in a worker, which browsers refuse to start from a file. There a frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.early = []
      window.addEventListener("message", event => {
        if (this.frame.contentWindow && event.source === this.frame.contentWindow) {
          const told = new MessageEvent("message", { data: event.data })
          this.dispatchEvent(told)
          if (this.onmessage) this.onmessage(told)
        }
      })
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = `<script>
        window.postMessage = data => parent.postMessage(data, "*")
        window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script")
          script.src = url; script.onload = done; script.onerror = failed
          document.body.appendChild(script)
        })), Promise.resolve())
      <\/script><script src="${new URL(url, location)}"><\/script>`
      this.frame.addEventListener("load", () => { this.ready = true; this.early.splice(0).forEach(data => this.postMessage(data)) })
      document.body.appendChild(this.frame)
    }
    postMessage(data) {
      if (!this.ready) { this.early.push(data); return }
      const inside = this.frame.contentWindow
      inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }
    terminate() { this.frame.remove() }
  }
}
