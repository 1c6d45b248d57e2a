"""Who may claim a hold, and the reasons against it."""

from __future__ import annotations

from kvferry.protocol.events import Held, Promised
from kvferry.protocol.hold import ClaimRecord, ClaimState, Hold, No
from kvferry.protocol.messages import Claim, OpenWrite, Release

MAX_RANKS = 1 << 16
"""More readers than that in one consumer engine is a malformed message."""


def mismatch(offer: Held | Promised, claim: Claim | OpenWrite) -> No | None:
    """In what the consumer's view differs from what is held or promised. Only a reader goes by the block ids."""
    if claim.num_tokens != offer.num_tokens:
        return No("digest", f"claimed for {claim.num_tokens} tokens, held {offer.num_tokens}")
    if claim.digest != offer.digest:
        return No("digest", f"claimed {claim.digest.hex()}, held {offer.digest.hex()}")
    if isinstance(claim, Claim) and isinstance(offer, Held) and claim.blocks_digest != offer.blocks_digest:
        return No("blocks", f"claimed {claim.blocks_digest.hex()}, held {offer.blocks_digest.hex()}")
    if claim.topology_digest != offer.topology_digest:
        return No("topology", f"claimed {claim.topology_digest.hex()}, held {offer.topology_digest.hex()}")
    return None


def refusal(record: ClaimRecord, num_ranks: int, rank: int | None = None) -> No | None:
    """Why a claim that was seen before can't go on, for this rank or (None) for its engine."""
    if record.num_ranks != num_ranks:
        return No("topology", f"claimed for {num_ranks} ranks, opened for {record.num_ranks}")
    if record.state is ClaimState.LAPSED:
        return No("lapsed", "the claim's lease ran out")
    if record.state is ClaimState.RELEASED:
        return No("released", "the claim was released", is_over=True)
    if rank is not None and rank in record.releases:
        return No("released", f"rank {rank} has released its part of the claim")
    return None


def admit(
    hold: Hold,
    claim_id: str,
    num_ranks: int,
    now: float,
    *,
    max_claims: int,
    closing: str | None,
    rank: int | None = None,
) -> ClaimRecord | No:
    """The open claim, newly opened if it was never seen; or why there is none."""
    if hold.failed:
        return No("failed", hold.failed)
    if claim_id in hold.disowned:
        return hold.disowned[claim_id]
    record = hold.claims.get(claim_id)
    if record is not None:
        return refusal(record, num_ranks, rank) or record
    if closing is not None:
        return No("ended", closing)
    if hold.longest_end <= now:  # only a writer that has not closed yet keeps it
        return No("lapsed", "it was held for as long as anything is")
    if len(hold.claims) >= max_claims:
        return No("busy", f"the transfer has {len(hold.claims)} claims already")
    return hold.open_claim(claim_id, num_ranks)


def ranks_make_sense(release: Release) -> bool:
    ranks = () if release.ranks is None else release.ranks
    return 0 < release.num_ranks <= MAX_RANKS and all(0 <= rank < release.num_ranks for rank in ranks)
