-- Returns all live workers.
return views()
