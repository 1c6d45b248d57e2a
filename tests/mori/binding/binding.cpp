// The module libmori_pybinds for a Python that AMD's wheel has none for: the part of it that mori.io uses.
//
// AMD's Python code (mori/io) and AMD's library (libmori_io.so) come from the wheel; this is what joins them. Names,
// signatures, and where the GIL is held, are those of AMD's module.

#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "mori/io/common.hpp"
#include "mori/io/engine.hpp"

namespace py = pybind11;
using namespace mori::io;
using py::arg;

namespace {

using without_gil = py::call_guard<py::gil_scoped_release>;

template <typename T>
py::bytes Pack(const T& value) {
  msgpack::sbuffer buffer;
  msgpack::pack(buffer, value);
  return py::bytes(buffer.data(), buffer.size());
}

template <typename T>
T Unpack(const py::bytes& packed) {
  std::string_view text = packed;
  return msgpack::unpack(text.data(), text.size()).get().template as<T>();
}

[[noreturn]] void NotHere() { throw std::runtime_error("this binding has only what kvferry's tests use"); }

void BindEnums(py::module_& m) {
  py::enum_<BackendType>(m, "BackendType")
      .value("Unknown", BackendType::Unknown)
      .value("XGMI", BackendType::XGMI)
      .value("RDMA", BackendType::RDMA)
      .value("TCP", BackendType::TCP)
      .value("FABRIC", BackendType::FABRIC);
  py::enum_<MemoryLocationType>(m, "MemoryLocationType")
      .value("Unknown", MemoryLocationType::Unknown)
      .value("CPU", MemoryLocationType::CPU)
      .value("GPU", MemoryLocationType::GPU);
  py::enum_<StatusCode>(m, "StatusCode")
      .value("SUCCESS", StatusCode::SUCCESS)
      .value("INIT", StatusCode::INIT)
      .value("IN_PROGRESS", StatusCode::IN_PROGRESS)
      .value("ERR_INVALID_ARGS", StatusCode::ERR_INVALID_ARGS)
      .value("ERR_NOT_FOUND", StatusCode::ERR_NOT_FOUND)
      .value("ERR_RDMA_OP", StatusCode::ERR_RDMA_OP)
      .value("ERR_BAD_STATE", StatusCode::ERR_BAD_STATE)
      .value("ERR_GPU_OP", StatusCode::ERR_GPU_OP);
  py::enum_<PollCqMode>(m, "PollCqMode").value("POLLING", PollCqMode::POLLING).value("EVENT", PollCqMode::EVENT);
  py::enum_<PeerFailureReason>(m, "PeerFailureReason")
      .value("UNKNOWN", PeerFailureReason::UNKNOWN)
      .value("PEER_UNREACHABLE", PeerFailureReason::PEER_UNREACHABLE)
      .value("LOCAL_QP_ERROR", PeerFailureReason::LOCAL_QP_ERROR)
      .value("LOCAL_PORT_DOWN", PeerFailureReason::LOCAL_PORT_DOWN)
      .value("LOCAL_DEVICE_FATAL", PeerFailureReason::LOCAL_DEVICE_FATAL)
      .value("LOCAL_CQ_ERROR", PeerFailureReason::LOCAL_CQ_ERROR);
}

void BindConfigs(py::module_& m) {
  py::class_<IOEngineConfig>(m, "IOEngineConfig")
      .def(py::init([](std::string host, uint16_t port) { return IOEngineConfig{std::move(host), port}; }),
           arg("host") = "", arg("port") = 0)
      .def_readwrite("host", &IOEngineConfig::host)
      .def_readwrite("port", &IOEngineConfig::port);
  py::class_<BackendConfig>(m, "BackendConfig");
  py::class_<RdmaBackendConfig, BackendConfig>(m, "RdmaBackendConfig")
      .def(py::init<int, int, int, PollCqMode, bool, uint32_t, bool, size_t, int, int>(), arg("qp_per_transfer") = 1,
           arg("post_batch_size") = -1, arg("num_worker_threads") = -1, arg("poll_cq_mode") = PollCqMode::POLLING,
           arg("enable_notification") = true, arg("notif_per_qp") = 1024, arg("enable_transfer_chunking") = false,
           arg("chunk_bytes") = 65536, arg("max_chunks_per_transfer") = 64, arg("num_nics_per_transfer") = 1)
      .def_readwrite("qp_per_transfer", &RdmaBackendConfig::qpPerTransfer)
      .def_readwrite("post_batch_size", &RdmaBackendConfig::postBatchSize)
      .def_readwrite("num_worker_threads", &RdmaBackendConfig::numWorkerThreads)
      .def_readwrite("enable_notification", &RdmaBackendConfig::enableNotification)
      .def_readwrite("max_send_wr", &RdmaBackendConfig::maxSendWr)
      .def_readwrite("max_cqe_num", &RdmaBackendConfig::maxCqeNum)
      .def_readwrite("max_msg_sge", &RdmaBackendConfig::maxMsgSge);
  py::class_<XgmiBackendConfig, BackendConfig>(m, "XgmiBackendConfig")
      .def(py::init<int, int>(), arg("num_streams") = 64, arg("num_events") = 64)
      .def_readwrite("num_streams", &XgmiBackendConfig::numStreams)
      .def_readwrite("num_events", &XgmiBackendConfig::numEvents);
  py::class_<FabricBackendConfig, BackendConfig>(m, "FabricBackendConfig")
      .def(py::init<int, int>(), arg("num_streams") = 64, arg("num_events") = 64);
}

void BindDescriptions(py::module_& m) {
  py::class_<EngineDesc>(m, "EngineDesc")
      .def_readonly("key", &EngineDesc::key)
      .def_readonly("node_id", &EngineDesc::nodeId)
      .def_readonly("hostname", &EngineDesc::hostname)
      .def_readonly("host", &EngineDesc::host)
      .def_readonly("port", &EngineDesc::port)
      .def_readonly("pid", &EngineDesc::pid)
      .def(py::self == py::self)
      .def("pack", &Pack<EngineDesc>)
      .def_static("unpack", &Unpack<EngineDesc>);
  py::class_<MemoryDesc>(m, "MemoryDesc")
      .def(py::init<>())
      .def_readonly("engine_key", &MemoryDesc::engineKey)
      .def_readonly("id", &MemoryDesc::id)
      .def_readonly("device_id", &MemoryDesc::deviceId)
      .def_readonly("device_bus_id", &MemoryDesc::deviceBusId)
      .def_readonly("data", &MemoryDesc::data)
      .def_readonly("size", &MemoryDesc::size)
      .def_readonly("loc", &MemoryDesc::loc)
      .def_readonly("numa_node", &MemoryDesc::numaNode)
      .def_property_readonly("ipc_handle",
                             [](const MemoryDesc& d) { return py::bytes(d.ipcHandle.data(), d.ipcHandle.size()); })
      .def(py::self == py::self)
      .def("pack", &Pack<MemoryDesc>)
      .def_static("unpack", &Unpack<MemoryDesc>);
  py::class_<PeerFailureEvent>(m, "PeerFailureEvent")
      .def_readonly("remote_engine_key", &PeerFailureEvent::remoteEngineKey)
      .def_readonly("reason", &PeerFailureEvent::reason)
      .def_readonly("qp_num", &PeerFailureEvent::qpNum)
      .def_readonly("detail", &PeerFailureEvent::detail);
}

void BindTransfers(py::module_& m) {
  py::class_<TransferStatus>(m, "TransferStatus")
      .def(py::init<>())
      .def("Code", &TransferStatus::Code)
      .def("Message", &TransferStatus::Message)
      .def("Update", &TransferStatus::Update)
      .def("Init", &TransferStatus::Init)
      .def("InProgress", &TransferStatus::InProgress)
      .def("Succeeded", &TransferStatus::Succeeded)
      .def("Failed", &TransferStatus::Failed)
      .def("SetCode", &TransferStatus::SetCode)
      .def("SetMessage", &TransferStatus::SetMessage)
      .def("Wait", &TransferStatus::Wait, without_gil())
      .def("WaitFor", &TransferStatus::WaitFor, arg("timeout_ms") = -1, without_gil());
  py::class_<IOEngineSession>(m, "IOEngineSession")
      .def("AllocateTransferUniqueId", &IOEngineSession::AllocateTransferUniqueId, without_gil())
      .def("Read", &IOEngineSession::Read, without_gil())
      .def("Write", &IOEngineSession::Write, without_gil())
      .def("BatchRead", &IOEngineSession::BatchRead, without_gil())
      .def("BatchWrite", &IOEngineSession::BatchWrite, without_gil())
      .def("Alive", &IOEngineSession::Alive);
}

std::optional<PeerFailureEvent> PopPeerFailure(IOEngine& engine) {
  PeerFailureEvent event;
  return engine.PopPeerFailure(&event) ? std::optional(event) : std::nullopt;
}

void BindEngine(py::module_& m) {
  py::class_<IOEngine>(m, "IOEngine")
      .def(py::init<const EngineKey&, const IOEngineConfig&>())
      .def("GetEngineDesc", &IOEngine::GetEngineDesc)
      .def("CreateBackend", &IOEngine::CreateBackend)
      .def("RemoveBackend", &IOEngine::RemoveBackend)
      .def("RegisterRemoteEngine", &IOEngine::RegisterRemoteEngine)
      .def("DeregisterRemoteEngine", &IOEngine::DeregisterRemoteEngine)
      .def("RegisterMemory", &IOEngine::RegisterMemory)
      .def("DeregisterMemory", &IOEngine::DeregisterMemory)
      .def("AllocateTransferUniqueId", &IOEngine::AllocateTransferUniqueId, without_gil())
      .def("Read", &IOEngine::Read, without_gil())
      .def("Write", &IOEngine::Write, without_gil())
      .def("BatchRead", &IOEngine::BatchRead, without_gil())
      .def("BatchWrite", &IOEngine::BatchWrite, without_gil())
      .def("CreateSession", &IOEngine::CreateSession)
      .def("PopInboundTransferStatus", &IOEngine::PopInboundTransferStatus, without_gil())
      .def("PopPeerFailure", &PopPeerFailure, without_gil())
      .def("WaitAll", &IOEngine::WaitAll, arg("statuses"), arg("timeout_ms") = -1, without_gil())
      .def("LoadScatterGatherModule", &IOEngine::LoadScatterGatherModule)
      .def("LoadFabricCopyModule", &IOEngine::LoadFabricCopyModule);
}

}  // namespace

PYBIND11_MODULE(libmori_pybinds, m) {
  BindEnums(m);
  BindConfigs(m);
  BindDescriptions(m);
  BindTransfers(m);
  BindEngine(m);
  m.def("set_log_level", [](const std::string&) { NotHere(); });
  m.def("fabric_alloc", [](py::args) { NotHere(); });
  m.def("fabric_free", [](py::args) { NotHere(); });
}
