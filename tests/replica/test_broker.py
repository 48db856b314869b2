"""The broker's own tests over the replicated store: every broker that is started begins on an empty directory."""

from __future__ import annotations

from tests.broker.test_details import test_what_is_staged_keeps_them as test_staging_with_details  # noqa: F401
from tests.broker.test_fetch import test_staging_becomes_visible_at_once_and_once as test_staging  # noqa: F401
from tests.broker.test_properties import test_they_come_back_after_a_restart as test_properties_come_back  # noqa: F401
from tests.broker.test_properties import test_they_travel_to_every_reader as test_properties_travel  # noqa: F401
from tests.broker.test_queues import (  # noqa: F401
    test_acknowledged_is_gone_and_the_rest_comes_again,
    test_consumers_share_a_queue,
    test_credit_bounds_what_a_consumer_holds,
    test_dead_letters_and_redrive,
    test_delayed_messages_survive_a_restart,
    test_duplicates_in_the_window_are_stored_once,
    test_everything_survives_a_restart,
    test_exclusive,
    test_nack_with_delay,
    test_purge_delete_list,
    test_redelivery_after_a_timeout,
    test_replay,
    test_time_to_live,
    test_transactions,
    test_wildcards,
)
from tests.broker.test_raw import (  # noqa: F401
    test_a_new_queue_starts_after_its_first_sub,
    test_a_queue_collects_with_nobody_connected,
    test_a_thousand_in_one_segment,
    test_one_client_a_queue,
    test_the_session_of_the_reference,
)
