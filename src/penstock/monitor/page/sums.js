// What the list of channels sums up: how many messages a second go over a channel, and over several, each message counted once.

// What publishes, as the sums of the monitor count it; a client's calls are no messages.
const publishes = handle => handle.kind === "publisher" || handle.kind === "source";
const ofGateway = handle => handle.room === "gateway";

// What is published on a channel from here; where nobody does, what its busiest handle counts.
export function rateOf(handles) {
  return handles.filter(publishes).reduce((sum, handle) => sum + handle.rate_hz, 0) || Math.max(...handles.map(handle => handle.rate_hz));
}

// The channels of a list that are added up. The others pass on messages that another channel of the list counts:
// a journal's writer, a broker and its queues those of the topics; a broker's journal those of the broker; a gateway's modules those of its sources.
export function counted(channels) {
  const whole = channel => channel.where.match(/^(journal:[^#]*|broker:\/\/[^/]*)/)?.[0];  // the journal or the broker that a topic is of
  const published = channel => channel.handles.some(publishes), pids = test => new Set(channels.flatMap(channel => channel.handles.filter(test).map(handle => handle.pid)));
  const byTopics = new Set(channels.filter(published).map(whole)), itself = new Set(channels.map(channel => channel.where));
  const brokers = pids(handle => handle.kind === "broker"), gateways = pids(handle => ofGateway(handle) && (publishes(handle) || handle.address));
  return channels.filter(channel => {
    if (published(channel)) return true;
    const inside = pids => channel.handles.every(handle => pids.has(handle.pid));
    if (channel.handles.every(handle => handle.kind === "writer" || (handle.kind === "queue" && handle.room === "broker")) && inside(brokers)) return false;
    if (channel.handles.every(ofGateway) && inside(gateways)) return channel.handles.some(handle => handle.address);
    return channel.where === whole(channel) ? !byTopics.has(channel.where) : byTopics.has(whole(channel)) || !itself.has(whole(channel));
  });
}
