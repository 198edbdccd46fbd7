#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "pipelines.h"

namespace qv {
namespace {

// Before the driver's data: drivers trust what they are given, so a damaged file must not reach them.
struct Seal {
  char magic[8];
  uint64_t bytes, hash;
};

constexpr char kMagic[8] = {'q', 'v', 'c', 'a', 'c', 'h', 'e', '1'};

uint64_t hash_of(const char* data, size_t bytes) {  // FNV-1a
  uint64_t hash = 14695981039346656037u;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<unsigned char>(data[i])) * 1099511628211u;
  return hash;
}

std::string hex(const uint8_t* bytes) {
  std::string text;
  for (size_t i = 0; i < VK_UUID_SIZE; ++i) {
    char pair[3];
    std::snprintf(pair, sizeof pair, "%02x", bytes[i]);
    text += pair;
  }
  return text;
}

bool write_all(int file, const char* data, size_t bytes) {
  while (bytes) {
    const ssize_t written = ::write(file, data, bytes);
    if (written <= 0) return false;
    data += written;
    bytes -= static_cast<size_t>(written);
  }
  return true;
}

}  // namespace

CacheFile::CacheFile(const Physical& device, const std::string& folder) : device_(device) {
  if (folder.empty()) return;
  path_ = folder + "/" + hex(device.properties11.driverUUID) + "-" +
          hex(device.properties.properties.pipelineCacheUUID) + ".bin";
}

// Does the driver's own header name this device? Vulkan wants drivers to check it; not all of them do.
bool CacheFile::fits(const std::vector<char>& data) const {
  VkPipelineCacheHeaderVersionOne header;
  if (data.size() < sizeof header) return false;
  std::memcpy(&header, data.data(), sizeof header);
  const VkPhysicalDeviceProperties& device = device_.properties.properties;
  return header.headerVersion == VK_PIPELINE_CACHE_HEADER_VERSION_ONE && header.vendorID == device.vendorID &&
         header.deviceID == device.deviceID &&
         !std::memcmp(header.pipelineCacheUUID, device.pipelineCacheUUID, VK_UUID_SIZE);
}

std::vector<char> CacheFile::read() const {
  if (path_.empty()) return {};
  std::ifstream file(path_, std::ios::binary);
  Seal seal;
  if (!file.read(reinterpret_cast<char*>(&seal), sizeof seal)) return {};
  std::vector<char> data{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const bool whole = !std::memcmp(seal.magic, kMagic, sizeof kMagic) && seal.bytes == data.size() &&
                     seal.hash == hash_of(data.data(), data.size());
  return whole && fits(data) ? data : std::vector<char>{};
}

// Readers see the old file or the new one, never half of one: written next to it and renamed.
void CacheFile::write(const std::vector<char>& data) const {
  if (path_.empty() || !fits(data)) return;
  std::string beside = path_ + ".XXXXXX";
  const int file = mkstemp(beside.data());
  if (file < 0) return;
  Seal seal;
  std::memcpy(seal.magic, kMagic, sizeof kMagic);
  seal.bytes = data.size();
  seal.hash = hash_of(data.data(), data.size());
  bool written = write_all(file, reinterpret_cast<const char*>(&seal), sizeof seal) &&
                 write_all(file, data.data(), data.size()) && !fchmod(file, 0644);
  written = !close(file) && written;
  if (!written || std::rename(beside.c_str(), path_.c_str())) unlink(beside.c_str());
}

}  // namespace qv
