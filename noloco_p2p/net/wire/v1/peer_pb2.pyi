from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefuseCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSE_UNSPECIFIED: _ClassVar[RefuseCode]
    REFUSE_BUSY: _ClassVar[RefuseCode]
    REFUSE_CROSSED: _ClassVar[RefuseCode]
    REFUSE_NOT_TRAINING: _ClassVar[RefuseCode]
    REFUSE_NO_STATE: _ClassVar[RefuseCode]
    REFUSE_STALE: _ClassVar[RefuseCode]
    REFUSE_OVER_SHARE: _ClassVar[RefuseCode]
    REFUSE_UNLISTED: _ClassVar[RefuseCode]
    REFUSE_BANNED: _ClassVar[RefuseCode]
    REFUSE_NOT_INVITED: _ClassVar[RefuseCode]
    REFUSE_OTHER_RUN: _ClassVar[RefuseCode]
    REFUSE_OTHER_SPEC: _ClassVar[RefuseCode]
    REFUSE_OTHER_VERSION: _ClassVar[RefuseCode]
    REFUSE_OTHER_MODEL: _ClassVar[RefuseCode]
    REFUSE_MALFORMED: _ClassVar[RefuseCode]

class AbortCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABORT_UNSPECIFIED: _ClassVar[AbortCode]
    ABORT_CORRUPT: _ClassVar[AbortCode]
    ABORT_TIMED_OUT: _ClassVar[AbortCode]
    ABORT_ABANDONED: _ClassVar[AbortCode]
    ABORT_LEAVING: _ClassVar[AbortCode]
    ABORT_INTERNAL: _ClassVar[AbortCode]
REFUSE_UNSPECIFIED: RefuseCode
REFUSE_BUSY: RefuseCode
REFUSE_CROSSED: RefuseCode
REFUSE_NOT_TRAINING: RefuseCode
REFUSE_NO_STATE: RefuseCode
REFUSE_STALE: RefuseCode
REFUSE_OVER_SHARE: RefuseCode
REFUSE_UNLISTED: RefuseCode
REFUSE_BANNED: RefuseCode
REFUSE_NOT_INVITED: RefuseCode
REFUSE_OTHER_RUN: RefuseCode
REFUSE_OTHER_SPEC: RefuseCode
REFUSE_OTHER_VERSION: RefuseCode
REFUSE_OTHER_MODEL: RefuseCode
REFUSE_MALFORMED: RefuseCode
ABORT_UNSPECIFIED: AbortCode
ABORT_CORRUPT: AbortCode
ABORT_TIMED_OUT: AbortCode
ABORT_ABANDONED: AbortCode
ABORT_LEAVING: AbortCode
ABORT_INTERNAL: AbortCode

class Hello(_message.Message):
    __slots__ = ("protocol_version", "run_name", "spec_digest", "peer_id", "layout")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    run_name: str
    spec_digest: str
    peer_id: str
    layout: str
    def __init__(self, protocol_version: _Optional[str] = ..., run_name: _Optional[str] = ..., spec_digest: _Optional[str] = ..., peer_id: _Optional[str] = ..., layout: _Optional[str] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("progress", "step_s", "free_in_s")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    FREE_IN_S_FIELD_NUMBER: _ClassVar[int]
    progress: float
    step_s: float
    free_in_s: float
    def __init__(self, progress: _Optional[float] = ..., step_s: _Optional[float] = ..., free_in_s: _Optional[float] = ...) -> None: ...

class Slice(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("hello", "swap_id", "standing", "ages", "at_most")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SWAP_ID_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    AGES_FIELD_NUMBER: _ClassVar[int]
    AT_MOST_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    swap_id: bytes
    standing: Standing
    ages: bytes
    at_most: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., swap_id: _Optional[bytes] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ..., ages: _Optional[bytes] = ..., at_most: _Optional[int] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("hello", "standing", "part")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    standing: Standing
    part: Slice
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ..., part: _Optional[_Union[Slice, _Mapping]] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("code", "sentence", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: RefuseCode
    sentence: str
    retry_after_s: float
    def __init__(self, code: _Optional[_Union[RefuseCode, str]] = ..., sentence: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Grid(_message.Message):
    __slots__ = ("exponents",)
    EXPONENTS_FIELD_NUMBER: _ClassVar[int]
    exponents: bytes
    def __init__(self, exponents: _Optional[bytes] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Abort(_message.Message):
    __slots__ = ("code", "sentence")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    code: AbortCode
    sentence: str
    def __init__(self, code: _Optional[_Union[AbortCode, str]] = ..., sentence: _Optional[str] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("hello", "swap_id")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SWAP_ID_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    swap_id: bytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., swap_id: _Optional[bytes] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Frame(_message.Message):
    __slots__ = ("sequence", "offer", "accept", "refuse", "grid", "header", "chunk", "received", "ready", "alive", "abort", "join", "leave")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    offer: Offer
    accept: Accept
    refuse: Refuse
    grid: Grid
    header: Header
    chunk: Chunk
    received: Received
    ready: Ready
    alive: Alive
    abort: Abort
    join: Join
    leave: Leave
    def __init__(self, sequence: _Optional[int] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., grid: _Optional[_Union[Grid, _Mapping]] = ..., header: _Optional[_Union[Header, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., received: _Optional[_Union[Received, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., join: _Optional[_Union[Join, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ...) -> None: ...

class FlowHello(_message.Message):
    __slots__ = ("hello", "stage")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    stage: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., stage: _Optional[int] = ...) -> None: ...

class MicrobatchId(_message.Message):
    __slots__ = ("head", "number")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    head: str
    number: int
    def __init__(self, head: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class MicrobatchTicket(_message.Message):
    __slots__ = ("id", "mark", "num_tokens", "is_training", "signature")
    ID_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_TRAINING_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    mark: float
    num_tokens: int
    is_training: bool
    signature: bytes
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ..., mark: _Optional[float] = ..., num_tokens: _Optional[int] = ..., is_training: bool = ..., signature: _Optional[bytes] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("ticket", "remaining_s", "sinks")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    ticket: MicrobatchTicket
    remaining_s: float
    sinks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ticket: _Optional[_Union[MicrobatchTicket, _Mapping]] = ..., remaining_s: _Optional[float] = ..., sinks: _Optional[_Iterable[str]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("id", "has_room")
    ID_FIELD_NUMBER: _ClassVar[int]
    HAS_ROOM_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    has_room: bool
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ..., has_room: bool = ...) -> None: ...

class Forward(_message.Message):
    __slots__ = ("id", "remaining_s", "payload")
    ID_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    remaining_s: float
    payload: int
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ..., remaining_s: _Optional[float] = ..., payload: _Optional[int] = ...) -> None: ...

class Backward(_message.Message):
    __slots__ = ("id", "payload")
    ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    payload: int
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ..., payload: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("is_backward", "payload")
    IS_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    is_backward: bool
    payload: bytes
    def __init__(self, is_backward: bool = ..., payload: _Optional[bytes] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("id", "is_taken")
    ID_FIELD_NUMBER: _ClassVar[int]
    IS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    is_taken: bool
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ..., is_taken: bool = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: MicrobatchTicket
    def __init__(self, ticket: _Optional[_Union[MicrobatchTicket, _Mapping]] = ...) -> None: ...

class FlowFrame(_message.Message):
    __slots__ = ("hello", "refuse", "want", "credit", "forward", "backward", "piece", "answer", "lost", "mark")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    hello: FlowHello
    refuse: Refuse
    want: Want
    credit: Credit
    forward: Forward
    backward: Backward
    piece: Piece
    answer: Answer
    lost: Lost
    mark: Mark
    def __init__(self, hello: _Optional[_Union[FlowHello, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., forward: _Optional[_Union[Forward, _Mapping]] = ..., backward: _Optional[_Union[Backward, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., mark: _Optional[_Union[Mark, _Mapping]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("hello", "spec", "manifest", "chunks", "layout")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    spec: SpecRequest
    manifest: ManifestRequest
    chunks: ChunksRequest
    layout: LayoutRequest
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., spec: _Optional[_Union[SpecRequest, _Mapping]] = ..., manifest: _Optional[_Union[ManifestRequest, _Mapping]] = ..., chunks: _Optional[_Union[ChunksRequest, _Mapping]] = ..., layout: _Optional[_Union[LayoutRequest, _Mapping]] = ...) -> None: ...

class SpecRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LayoutRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChunksRequest(_message.Message):
    __slots__ = ("manifest_digest", "indices")
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    manifest_digest: bytes
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, manifest_digest: _Optional[bytes] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("spec_json", "manifest", "chunk", "refuse", "layout_json")
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    spec_json: bytes
    manifest: Manifest
    chunk: StateChunk
    refuse: Refuse
    layout_json: bytes
    def __init__(self, spec_json: _Optional[bytes] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., chunk: _Optional[_Union[StateChunk, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., layout_json: _Optional[bytes] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("layout", "num_elements", "progress", "num_bytes", "chunk_digests")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    layout: str
    num_elements: int
    progress: float
    num_bytes: int
    chunk_digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, layout: _Optional[str] = ..., num_elements: _Optional[int] = ..., progress: _Optional[float] = ..., num_bytes: _Optional[int] = ..., chunk_digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("index", "payload")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    index: int
    payload: bytes
    def __init__(self, index: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("hello", "swap_id")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SWAP_ID_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    swap_id: bytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., swap_id: _Optional[bytes] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("hello", "state", "progress", "has_verified", "refuse")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HAS_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    state: str
    progress: float
    has_verified: bool
    refuse: Refuse
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., state: _Optional[str] = ..., progress: _Optional[float] = ..., has_verified: bool = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ...) -> None: ...
