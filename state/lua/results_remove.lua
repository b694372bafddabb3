-- KEYS ended, bytes   ARGV requests...

for _, request in ipairs(ARGV) do
  forget_result(KEYS[1], KEYS[2], request)
end
return #ARGV
