/* A processor's core for others, in the middle of long work. */
#ifndef BATON_GIVE_WAY_H
#define BATON_GIVE_WAY_H

/* Called between two pieces of work: offers this thread's core to whoever waits for it, once in the time that was set. */
void baton_give_way(void);

#endif
