"""``offload serve``: an HTTP server in OpenAI's dialect over one model.

``engine`` runs requests on its own thread, which alone touches the model; ``app`` speaks HTTP on
asyncio's; between them go immutable requests and events. Importing this package imports nothing
heavy; its modules want the extra ``serve``.
"""
