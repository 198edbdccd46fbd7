// A writer of JSON: values and members in the order they are given.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace qv {

class Json {
 public:
  std::string text;

  Json& open(char bracket) {
    separate();
    text += bracket;
    return *this;
  }
  Json& close(char bracket) {
    text += bracket;
    return *this;
  }
  Json& key(const char* name) {
    quote(name);
    text += ':';
    return *this;
  }
  Json& value(uint64_t number) {
    separate();
    text += std::to_string(number);
    return *this;
  }
  Json& value(double number) {
    separate();
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.9g", number);
    text += digits;
    return *this;
  }
  Json& flag(bool truth) {
    separate();
    text += truth ? "true" : "false";
    return *this;
  }
  Json& quote(const std::string& words) {
    separate();
    text += '"';
    for (unsigned char letter : words) {
      if (letter < ' ') continue;  // names of devices have no use for control characters
      if (letter == '"' || letter == '\\') text += '\\';
      text += static_cast<char>(letter);
    }
    text += '"';
    return *this;
  }
  Json& hex(const uint8_t* bytes, size_t count) {
    std::string digits;
    for (size_t i = 0; i < count; ++i) {
      char pair[3];
      std::snprintf(pair, sizeof pair, "%02x", bytes[i]);
      digits += pair;
    }
    return quote(digits);
  }

 private:
  void separate() {
    if (!text.empty() && text.back() != '[' && text.back() != '{' && text.back() != ':') text += ',';
  }
};

}  // namespace qv
