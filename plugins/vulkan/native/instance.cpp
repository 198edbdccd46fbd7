#include "instance.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <mutex>

#include "error.h"
#include "qcore_vulkan.h"

namespace qv {
namespace {

constexpr char kLayer[] = "VK_LAYER_KHRONOS_validation";
constexpr uint32_t kInstanceApi = VK_API_VERSION_1_3;  // what we know of; a device may offer less

void* open_loader() {
  void* library = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) library = dlopen("libvulkan.so", RTLD_NOW | RTLD_LOCAL);
  if (!library) throw Error(QV_UNAVAILABLE, std::string("no loader: ") + dlerror());
  return library;
}

GlobalFunctions load_globals() {
  GlobalFunctions vk;
  void* library = open_loader();
  vk.vkGetInstanceProcAddr =
      reinterpret_cast<PFN_vkGetInstanceProcAddr>(dlsym(library, "vkGetInstanceProcAddr"));
  if (!vk.vkGetInstanceProcAddr) throw Error(QV_UNAVAILABLE, "no loader: libvulkan lacks vkGetInstanceProcAddr");
#define QV_LOAD(name)                                                                        \
  vk.name = reinterpret_cast<PFN_##name>(vk.vkGetInstanceProcAddr(VK_NULL_HANDLE, #name)); \
  if (!vk.name) throw Error(QV_UNAVAILABLE, "no loader: libvulkan is too old, it lacks " #name);
  QV_GLOBAL_FUNCTIONS(QV_LOAD)
#undef QV_LOAD
  return vk;
}

const GlobalFunctions& globals() {
  static const GlobalFunctions vk = load_globals();  // tried anew while it fails
  return vk;
}

void require_layer() {
  uint32_t count = 0;
  check(globals().vkEnumerateInstanceLayerProperties(&count, nullptr), "vkEnumerateInstanceLayerProperties");
  std::vector<VkLayerProperties> layers(count);
  check(globals().vkEnumerateInstanceLayerProperties(&count, layers.data()), "vkEnumerateInstanceLayerProperties");
  for (const VkLayerProperties& layer : layers) {
    if (!std::strcmp(layer.layerName, kLayer)) return;
  }
  throw Error(QV_UNAVAILABLE, "the Vulkan validation layer is not installed: apt-get install vulkan-validationlayers");
}

VKAPI_ATTR VkBool32 VKAPI_CALL heard(VkDebugUtilsMessageSeverityFlagBitsEXT, VkDebugUtilsMessageTypeFlagsEXT,
                                     const VkDebugUtilsMessengerCallbackDataEXT* data, void* messages) {
  ++*static_cast<std::atomic<uint64_t>*>(messages);
  std::fprintf(stderr, "qcore-vulkan: %s\n", data->pMessage);
  return VK_FALSE;
}

}  // namespace

void check_process(pid_t owner) {
  if (getpid() == owner) return;
  throw Error(QV_FORKED,
              "Vulkan was opened before this process was forked, and drivers do not survive that; "
              "start workers with the 'spawn' method");
}

Instance& Instance::get(bool validate) {
  static std::mutex mutex;
  static Instance* instances[2] = {nullptr, nullptr};
  static pid_t opener = getpid();
  check_process(opener);  // before the lock: another thread may have held it at the fork
  std::lock_guard<std::mutex> lock(mutex);
  Instance*& instance = instances[validate];
  if (!instance) instance = new Instance(validate);
  return *instance;
}

Instance::Instance(bool validate) : owner_(getpid()) {
  uint32_t version = 0;
  check(globals().vkEnumerateInstanceVersion(&version), "vkEnumerateInstanceVersion");
  if (version < VK_API_VERSION_1_2) throw Error(QV_UNAVAILABLE, "no loader: libvulkan is older than Vulkan 1.2");
  if (validate) require_layer();
  const char* layers[] = {kLayer};
  const char* extensions[] = {VK_EXT_DEBUG_UTILS_EXTENSION_NAME, VK_EXT_VALIDATION_FEATURES_EXTENSION_NAME};
  const VkValidationFeatureEnableEXT barriers = VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT;
  VkValidationFeaturesEXT features{VK_STRUCTURE_TYPE_VALIDATION_FEATURES_EXT};
  features.enabledValidationFeatureCount = 1;
  features.pEnabledValidationFeatures = &barriers;
  VkApplicationInfo application{VK_STRUCTURE_TYPE_APPLICATION_INFO};
  application.pApplicationName = "qcore";
  application.apiVersion = kInstanceApi;
  VkInstanceCreateInfo info{VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO};
  info.pApplicationInfo = &application;
  if (validate) {
    info.pNext = &features;
    info.enabledLayerCount = 1;
    info.enabledExtensionCount = 2;
  }
  info.ppEnabledLayerNames = layers;
  info.ppEnabledExtensionNames = extensions;
  VkResult result = globals().vkCreateInstance(&info, nullptr, &handle_);
  if (result == VK_ERROR_INCOMPATIBLE_DRIVER) {
    throw Error(QV_UNAVAILABLE, "no driver: vkCreateInstance: VK_ERROR_INCOMPATIBLE_DRIVER");
  }
  check(result, "vkCreateInstance");
  load();
  if (validate) listen();
}

void Instance::load() {
  auto find = globals().vkGetInstanceProcAddr;
#define QV_LOAD(name)                                              \
  vk.name = reinterpret_cast<PFN_##name>(find(handle_, #name)); \
  if (!vk.name) throw Error(QV_UNAVAILABLE, "the Vulkan instance has no " #name);
  QV_INSTANCE_FUNCTIONS(QV_LOAD)
#undef QV_LOAD
  vk.vkCreateDebugUtilsMessengerEXT =
      reinterpret_cast<PFN_vkCreateDebugUtilsMessengerEXT>(find(handle_, "vkCreateDebugUtilsMessengerEXT"));
  vk.vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR =
      reinterpret_cast<PFN_vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR>(
          find(handle_, "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"));
}

void Instance::listen() {
  if (!vk.vkCreateDebugUtilsMessengerEXT) throw Error(QV_UNAVAILABLE, "the Vulkan instance has no debug messenger");
  VkDebugUtilsMessengerCreateInfoEXT info{VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT};
  info.messageSeverity =
      VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT | VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT;
  info.messageType = VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT;
  info.pfnUserCallback = heard;
  info.pUserData = &messages;
  VkDebugUtilsMessengerEXT messenger;
  check(vk.vkCreateDebugUtilsMessengerEXT(handle_, &info, nullptr, &messenger), "vkCreateDebugUtilsMessengerEXT");
}

std::vector<VkPhysicalDevice> Instance::devices() const {
  check_process(owner_);
  uint32_t count = 0;
  check(vk.vkEnumeratePhysicalDevices(handle_, &count, nullptr), "vkEnumeratePhysicalDevices");
  std::vector<VkPhysicalDevice> found(count);
  check(vk.vkEnumeratePhysicalDevices(handle_, &count, found.data()), "vkEnumeratePhysicalDevices");
  found.resize(count);
  return found;
}

}  // namespace qv
